"""Features: the states of the patches at a layer, their principal components, similarities and norms.

| part      | what a patch's feature is                                                           |
| --------- | ----------------------------------------------------------------------------------- |
| "tokens"  | the output of block l, by default after the model's final norm (x_norm of DINOv2)   |
| "keys"    | the keys of block l's attention, all heads side by side, as the queries meet them   |
| "queries" | the queries                                                                         |
| "values"  | the values                                                                          |

Formulas: docs/equations.md#features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.loading.inputs import announce, at_once, prepare_inputs
from steadygaze.look.drawing import cell_image, checked_index, overlay, write_result
from steadygaze.notebook import to_png
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.results.drawing import Row, robust_scale, tile
from steadygaze.trace import Seam, Want
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.view import ViT

Part = Literal["tokens", "keys", "queries", "values"]
PARTS: tuple[str, ...] = get_args(Part)
SHOWN = 32  # images in a notebook and on the command line
COLOR_PERCENTILES = (1.0, 99.0)  # of a component, which get the darkest and the brightest color


def features(
    model: Any,
    images: Any,
    layer: int = -1,
    part: Part = "tokens",
    *,
    norm: bool = True,
    transform: Callable[[Image.Image], Tensor] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Features:
    """Read the features of every patch at one layer of a model.

    Args:
        model: A vision transformer, with or without a classifier: a module, a name, or what `load_model`
            gives.
        images: A path, a PIL image, an array (H, W, 3) of uint8, a list or folder of them, or a preprocessed
            tensor (B, 3, H, W).
        layer: The block, counted from 0; negative numbers count from the last block.
        part: "tokens" (the block's output), or "keys", "queries" or "values" of its attention.
        norm: Whether tokens pass the model's final norm, as in the figures of DINOv2. Models that normalize
            pooled features only have no such norm, and neither have the earlier stages of a hierarchy.
        transform: How an image becomes the tensor (3, H, W) that a bare module takes.
        on_progress: Called with a `Progress` between batches; a batch has bounded size, whatever the number
            of images.

    Returns:
        The features (B, rows, columns, D) with the images.

    Raises:
        InputError: If the layer does not exist, or the images do not fit the model.
        UnknownNameError: If `part` is not one of the four names.
        MethodUnavailableError: If keys, queries or values are requested of attention in windows.

    Examples:
        >>> import steadygaze as sg, torch
        >>> f = sg.features(sg.load_model("embedded"), torch.zeros(2, 3, 32, 32))
        >>> f.values.shape, f.pca().colors.shape, f.similarity(0, point=(3, 4)).shape
        (torch.Size([2, 8, 8, 128]), torch.Size([2, 8, 8, 3]), torch.Size([2, 8, 8]))
    """
    if part not in PARTS:
        raise UnknownNameError("part", part, PARTS)
    inputs = prepare_inputs(model, images, transform)
    vit = adapt(inputs.model)
    layer = checked_index("layer", layer, len(vit.blocks))
    if part != "tokens" and not vit.plan.global_attention:
        raise MethodUnavailableError(
            f"part={part!r}: a {vit.plan.kind} attends in windows or to reduced keys, so its {part} do not "
            "lie on the grid of the image. Use part='tokens'."
        )
    ready = vit.check(inputs.images)
    values: list[Tensor] = []
    prefixes: list[Tensor] = []
    with torch.no_grad(), without_autocast(vit.model), evaluation_mode(vit.model):
        for some in ready.split(at_once(ready)):
            on_progress(Progress("features", sum(map(len, values)), len(ready), "images"))
            patches, prefix = _read(vit, some, layer, part, norm)
            if not values:
                needed = len(ready) * patches[0].numel() * patches.element_size()
                announce(needed, f"reading features of {len(ready)} images", "Use fewer images at a time.")
            values.append(patches)
            prefixes.append(prefix)
    on_progress(Progress("features", len(ready), len(ready), "images"))
    return Features(torch.cat(values), torch.cat(prefixes), part, inputs.shown, inputs.names)


def _read(
    vit: ViT, images: Float[Tensor, "b c h w"], layer: int, part: str, norm: bool
) -> tuple[Float[Tensor, "b h w d"], Float[Tensor, "b p d"]]:
    """Features of the patches on their grid, and those of the prefix tokens."""
    x = vit.embed(images)
    for block in vit.blocks[:layer]:
        x = block(x)
    layout = vit.layout(x)
    if part == "tokens":
        x = vit.blocks[layer](x)
        x = final_norm(vit, x, layer) if norm else x
        layer += 1  # x is the input of the next block
    else:
        x = _attention_part(vit, x, layer, part)
    return vit.patches(layer, x, layout), x[:, : vit.prefix]


def final_norm(vit: ViT, x: Float[Tensor, "b n d"], layer: int) -> Float[Tensor, "b n d"]:
    """The output of block `layer` after the norm with which the head begins, if that acts on all tokens."""
    last = layer == len(vit.blocks) - 1
    if not last and (vit.plan.reads_layers or not vit.plan.global_attention):
        return x
    with Seam(want=Want(norm=True)) as seam:
        record = seam.next_record()
        vit.head(x)
    return next((y for y in record.norms if y.shape == x.shape), x)


def _attention_part(vit: ViT, x: Tensor, layer: int, part: str) -> Float[Tensor, "b n d"]:
    with Seam(want=Want(query=True, value=True)) as seam:
        record = seam.next_record()
        vit.blocks[layer](x)
    name = {"keys": "k", "queries": "q", "values": "v"}[part]
    found = [getattr(attention, name) for attention in record.attention]
    if not found or any(tensor is None for tensor in found):
        raise MethodUnavailableError(
            f"the {part} of block {layer} of this {vit.plan.kind} cannot be seen: its attention mixes heads, "
            "or runs in a kernel of its own. Use part='tokens'."
        )
    return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in found], dim=-1)


@dataclass(frozen=True, eq=False)
class Features:
    """Features of patches, with the images they are of.

    Attributes:
        values: Features of every patch, (B, rows, columns, D).
        prefix: Features of class, distillation and register tokens, (B, prefix, D).
        part: "tokens", "keys", "queries" or "values".
        images: What the model saw, one PIL image each; None where it is not known.
        names: A name for each image.
    """

    values: Float[Tensor, "b h w d"]
    prefix: Float[Tensor, "b p d"] = field(repr=False)
    part: str
    images: tuple[Image.Image, ...] | None = field(repr=False)
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return f"Features({self.part}, values {tuple(self.values.shape)})"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.values.shape[1], self.values.shape[2]

    def norms(self) -> Float[Tensor, "b h w"]:
        """Euclidean norm of each patch's feature."""
        return self.values.norm(dim=-1)

    def similarity(self, image: int, point: tuple[int, int]) -> Float[Tensor, "b h w"]:
        """Cosine of the feature of one patch with that of every patch of every image, in [-1, 1].

        Args:
            image: The image of the patch, counted from 0.
            point: Row and column of the patch; negative numbers count from the end.
        """
        if not isinstance(point, (tuple, list)) or len(point) != 2:
            raise InputError(f"point: expected (row, column), got {point!r}")
        at = checked_index("image", image, len(self))
        row, column = (checked_index("point", i, size) for i, size in zip(point, self.grid, strict=True))
        return torch.cosine_similarity(self.values, self.values[at, row, column], dim=-1)

    def pca(self, components: int = 3, *, foreground: bool = False) -> PCA:
        """Principal components over the patches of all images together.

        Args:
            components: Number of components, at most D and at most the number of patches.
            foreground: Split the patches by the first component first, and take the components of one side
                only, as in the figure of DINOv2. The foreground is the side that has the smaller share of the
                patches at the border of the images.
        """
        flat = self.values.flatten(0, 2).to(torch.float64)
        most = min(flat.shape)
        if not isinstance(components, int) or not 1 <= components <= most:
            raise InputError(f"components: expected 1..{most}, got {components!r}")
        if not foreground:
            projected, directions, explained = _principal(flat, components)
            return self._pca(projected, None, directions, explained)
        first = _principal(flat, 1)[0][:, 0]
        inside = _foreground(first, len(self), self.grid)
        if int(inside.sum()) < max(components, 2):
            raise InputError(
                f"foreground: the split leaves {int(inside.sum())} patches, too few for {components} "
                "components. Use foreground=False."
            )
        some, directions, explained = _principal(flat[inside], components)
        projected = flat.new_zeros(len(flat), components)
        projected[inside] = some
        return self._pca(projected, inside.view(len(self), *self.grid), directions, explained)

    def _pca(self, projected: Tensor, inside: Tensor | None, directions: Tensor, explained: Tensor) -> PCA:
        dtype = self.values.dtype
        on_grid = projected.view(len(self), *self.grid, -1).to(dtype)
        return PCA(on_grid, inside, directions.to(dtype), explained.to(dtype), self.images, self.names)

    def figure(
        self,
        kind: Literal["pca", "similarity", "norms"] = "pca",
        *,
        image: int = 0,
        point: tuple[int, int] | None = None,
        foreground: bool = False,
        limit: int | None = None,
        cell: int = 224,
    ) -> Image.Image:
        """Draw every image beside its principal components, its similarity to one patch, or its norms.

        Args:
            kind: "pca", "similarity" (needs `point`) or "norms".
            image: The image that `point` is in.
            point: Row and column of the patch that all others are compared with.
            foreground: As for `pca`.
            limit: Draw at most this many images, the first ones; the scale is that of all.
            cell: Width of a column in pixels.
        """
        if kind == "pca":
            found = self.pca(min(3, *self.values.flatten(0, 2).shape), foreground=foreground)
            return found.figure(limit=limit, cell=cell)
        if kind == "norms":
            maps, heading = self.norms(), "norm"
            maps = maps - maps.amin((-2, -1), keepdim=True)
        elif kind == "similarity":
            if point is None:
                raise InputError("point: expected row and column of a patch, got none")
            maps, heading = self.similarity(image, point), f"similar to patch {tuple(point)}"
        else:
            raise UnknownNameError("figure", kind, ("pca", "similarity", "norms"))
        # one scale for all images: equal colors are equal numbers
        full = robust_scale(maps.detach().clamp(min=0).float().cpu().numpy())
        rows = []
        for number in range(len(self))[:limit]:
            marked = point if kind == "similarity" and number == image % len(self) else None
            original = cell_image(self.images, number, self.grid, cell, mark=marked)
            rows.append(Row([original, overlay(maps[number], original, full=full)], self.names[number]))
        return tile(rows, ["image", heading], cell=cell)

    def save(self, path: str | Path) -> Path:
        """Write the features to a file: their PCA as an image (.png, ...), or the numbers (.npz).

        Returns:
            The file.
        """
        return write_result(path, self.figure, self._numbers)

    def _numbers(self) -> dict[str, np.ndarray]:
        arrays = {"values": self.values, "prefix": self.prefix}
        numbers = {name: tensor.float().cpu().numpy() for name, tensor in arrays.items()}
        return {**numbers, "names": np.array(self.names)}

    def _repr_png_(self) -> bytes:
        return to_png(self.figure(limit=SHOWN))


@dataclass(frozen=True, eq=False)
class PCA:
    """Principal components of features.

    Attributes:
        components: Projections of each patch, (B, rows, columns, k); 0 outside the foreground.
        foreground: The patches that the components were taken of, (B, rows, columns); None: all.
        directions: Unit vectors (k, D).
        explained: Share of the variance of each component, (k,).
        images: What the model saw; None where it is not known.
        names: A name for each image.
    """

    components: Float[Tensor, "b h w k"]
    foreground: Bool[Tensor, "b h w"] | None
    directions: Float[Tensor, "k d"]
    explained: Float[Tensor, " k"]
    images: tuple[Image.Image, ...] | None = field(repr=False)
    names: tuple[str, ...] = field(repr=False)

    def __repr__(self) -> str:
        shares = ", ".join(f"{100 * share:.0f} %" for share in self.explained.tolist())
        return f"PCA(components {tuple(self.components.shape)}, explained {shares})"

    @property
    def colors(self) -> Float[Tensor, "b h w 3"]:
        """The first three components as red, green and blue in [0, 1]; black outside the foreground."""
        used = self.components[..., :3]
        inside = (
            torch.ones_like(used[..., 0], dtype=torch.bool) if self.foreground is None else self.foreground
        )
        limits = torch.tensor(COLOR_PERCENTILES, dtype=used.dtype, device=used.device) / 100
        low, high = torch.quantile(used[inside].float(), limits.float(), dim=0).to(used.dtype)
        scaled = ((used - low) / (high - low).clamp_min(torch.finfo(used.dtype).tiny)).clamp(0, 1)
        scaled = scaled * inside[..., None]
        missing = 3 - scaled.shape[-1]  # fewer components than colors: the last one is repeated
        return torch.cat([scaled, *[scaled[..., -1:]] * missing], dim=-1)

    def figure(self, *, limit: int | None = None, cell: int = 224) -> Image.Image:
        """Every image, or the first `limit` ones, beside its components as colors."""
        grid = self.components.shape[1], self.components.shape[2]
        rows = []
        for number, colors in enumerate(self.colors[:limit]):
            pixels = (colors.float().cpu().numpy() * 255).round().astype(np.uint8)
            drawn = Image.fromarray(pixels).resize((cell, cell), Image.Resampling.NEAREST)
            rows.append(Row([cell_image(self.images, number, grid, cell), drawn], self.names[number]))
        return tile(rows, ["image", "principal components"], cell=cell)

    def save(self, path: str | Path) -> Path:
        """Write the figure to an image file."""
        return write_result(path, self.figure)

    def _repr_png_(self) -> bytes:
        return to_png(self.figure(limit=SHOWN))


def _principal(x: Float[Tensor, "n d"], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(projections (n, k), directions (k, D), share of variance (k,)) of centered rows.

    The largest entry of each direction is positive, so that the sign is the same on every machine.
    """
    centered = x - x.mean(0)
    _, singular, directions = torch.linalg.svd(centered, full_matrices=False)
    directions = directions[:count]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    variance = singular.square()
    explained = variance[:count] / variance.sum().clamp_min(torch.finfo(x.dtype).tiny)
    return centered @ directions.T, directions, explained


def _foreground(first: Float[Tensor, " n"], images: int, grid: tuple[int, int]) -> Bool[Tensor, " n"]:
    """The side of the first component that has the smaller share of the patches at the images' borders."""
    border = torch.ones(grid, dtype=torch.bool, device=first.device)
    border[1:-1, 1:-1] = False
    at_border = border.flatten().repeat(images)
    positive = first > 0
    shares = [float(at_border[side].double().mean()) if side.any() else 1.0 for side in (positive, ~positive)]
    return positive if shares[0] <= shares[1] else ~positive
