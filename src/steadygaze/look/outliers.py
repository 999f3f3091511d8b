"""Outlier tokens: patches of high norm, which many trained models use as memory (Darcet et al. 2024).

Norms n^l_p = ‖x^{l+1}_p‖ of the patches p of one image behind block l, median m^l and spread
s^l = 1.4826 · median_p |n^l_p − m^l| (docs/equations.md#outliers):

    p is high at l      n^l_p ≥ 2 m^l   and   n^l_p > m^l + 5 s^l
    l*                  the l with the largest mean over images of max_p n^l_p / m^l
    outliers            the patches that are high at l*
    first               the first l such that at l, …, l* at least half of the outliers are high
    sinks               whether an outlier gets at least twice the attention of an average patch, in the mean
                        over the last third of the blocks

Attention is that of the class token, or the mean over all queries where there is none, averaged over heads
and divided by what all patches get.

Register neurons (Jiang et al. 2025; docs/equations.md#registers) are those whose mean |activation| at
outliers is largest, among the blocks up to `first`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.loading.inputs import at_once, prepare_inputs
from steadygaze.look.drawing import write_result
from steadygaze.modules.registers import MAX_NEURONS, Maximum, Registers, last_linear
from steadygaze.notebook import to_png
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.results.drawing import Row, paint, tile
from steadygaze.target import at_least_float32
from steadygaze.trace.record import Want
from steadygaze.trace.seam import Seam
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import answered, evaluation_mode, without_autocast
from steadygaze.vit.view import ViT

RATIO = 2.0  # a high norm is at least twice the median
SPREADS = 5.0  # and more than five robust standard deviations above it
SINK = 2.0  # a sink gets at least twice the attention of a patch
SHOWN = 6  # images in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class Outliers:
    """Which patches carry high norms, from which block on, and whether they are attention sinks.

    Attributes:
        mask: The outlier tokens, on the grid of patches.
        norms: Norms of the patches behind every block.
        attention: The attention that each patch gets in every block, as a share of what all patches get.
        layer: The block where norms differ most; the mask is that of its outputs.
        first: The first block behind which the outliers are high; None without outliers.
        query: Whose attention it is: the "class" token's, or the "mean" over all tokens.
        names: Names of the images.
        images: The images, if they are known.

    Examples:
        >>> import steadygaze as sg, torch
        >>> out = sg.outliers(sg.load_model("embedded"), torch.randn(2, 3, 32, 32))
        >>> out.mask.shape, out.norms.shape
        (torch.Size([2, 8, 8]), torch.Size([2, 6, 8, 8]))
    """

    mask: Bool[Tensor, "b h w"]
    norms: Float[Tensor, "b l h w"]
    attention: Float[Tensor, "b l h w"]
    layer: int
    first: int | None
    query: Literal["class", "mean"]
    names: tuple[str, ...] = ()
    images: tuple[Image.Image, ...] | None = field(default=None)

    @property
    def counts(self) -> Tensor:
        """Number of outlier tokens of each image, (B,)."""
        return self.mask.flatten(1).sum(1)

    @property
    def patch_share(self) -> float:
        """Share of the patches that are outliers, over the images that have any; 0 if none has."""
        return float(self.mask[self.counts > 0].float().mean()) if self.mask.any() else 0.0

    @property
    def attention_share(self) -> Float[Tensor, " l"]:
        """Share of the attention to patches that outliers get, for each block, over the images with any."""
        some = self.counts > 0
        if not some.any():
            return self.attention.new_zeros(self.attention.shape[1])
        return (self.attention * self.mask[:, None])[some].sum((2, 3)).mean(0)

    @property
    def sinks(self) -> bool:
        """Whether outliers get at least twice their share of attention in the last third of the blocks."""
        last = max(1, self.norms.shape[1] // 3)
        return bool(self.mask.any()) and float(self.attention_share[-last:].mean()) >= SINK * self.patch_share

    @property
    def advice(self) -> str:
        """One sentence: what was found, and what to do about it."""
        images, found = len(self.mask), int((self.counts > 0).sum())
        if not found:
            return (
                f"No outlier tokens in {_images(images)}: no patch has twice the median norm and lies far "
                f"outside the spread of the others (block {self.layer}); nothing needs to be done."
            )
        last = max(1, self.norms.shape[1] // 3)
        whose = "the class token's attention" if self.query == "class" else "the attention"
        each = float(self.counts[self.counts > 0].float().mean())
        what = (
            f"{found} of {_images(images)} have outlier tokens ({each:.1f} each, high from block "
            f"{self.first} on), and in the last {last} blocks they get "
            f"{float(self.attention_share[-last:].mean()):.1%} of {whose} to patches, being "
            f"{self.patch_share:.1%} of the patches: "
        )
        if self.sinks:
            return (
                what + "they are attention sinks, so do not read attention maps and features there; use "
                "methods that remove or weigh tokens (gaze_removal, gaze), or insert test-time registers "
                "(sg.find_registers, sg.modules.insert)."
            )
        return (
            what + "they are not attention sinks, so attention maps are usable; leave these patches out of "
            "comparisons of features (PCA, similarity)."
        )

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        return f"Outliers({self.advice})"

    def figure(self, *, limit: int | None = None, cell: int = 224) -> Image.Image:
        """Norms, outlier tokens and the last block's attention of each image, one row for each.

        Args:
            limit: Draw at most this many images.
            cell: Width of a column, in pixels.
        """
        numbers = range(len(self) if limit is None else min(limit, len(self)))
        rows = [self._row(number, cell) for number in numbers]
        query = "class" if self.query == "class" else "all"
        headings = [
            *(["image"] if self.images is not None else []),
            f"norms, block {self.layer}",
            "outlier tokens",
            f"attention of {query}, block {len(self.norms[0]) - 1}",
        ]
        return tile(rows, headings, cell=cell)

    def _row(self, number: int, cell: int) -> Row:
        image = None if self.images is None else self.images[number].convert("RGB")
        size = (cell, cell) if image is None else image.size
        norms, attention = self.norms[number, self.layer], self.attention[number, -1]
        maps = [norms / norms.max().clamp_min(1e-12), self.mask[number].float()]
        maps.append(attention / attention.max().clamp_min(1e-12))
        drawn = [
            paint(_enlarged(values, size), image if number_of_map == 1 else None)
            for number_of_map, values in enumerate(maps)
        ]
        name = self.names[number] if self.names else str(number)
        note = f"{int(self.counts[number])} outlier tokens"
        return Row([*([] if image is None else [image]), *drawn], name, note)

    def save(self, path: str | Path) -> Path:
        """Write the figure (.png, ...), or mask, norms and attention (.npz); returns the path."""
        return write_result(path, self.figure, self._numbers)

    def _numbers(self) -> dict[str, np.ndarray]:
        arrays = {"mask": self.mask, "norms": self.norms, "attention": self.attention}
        return {**{name: tensor.numpy() for name, tensor in arrays.items()}, "names": np.array(self.names)}

    def _repr_png_(self) -> bytes:
        return to_png(self.figure(limit=SHOWN))


def outliers(
    model: Any,
    images: Any,
    *,
    transform: Callable[[Image.Image], Tensor] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Outliers:
    """Find the outlier tokens of a model on some images.

    Args:
        model: A vision transformer with attention over all tokens, its name, or the result of `load_model`.
        images: A tensor (B, 3, H, W) for the model, or images and files.
        transform: From a PIL image to a tensor (3, H, W), if the model does not declare it.
        on_progress: Called with a `Progress` between batches.

    Returns:
        Masks, norms and attention, with `advice` and `figure()`.

    Raises:
        MethodUnavailableError: If the model's attention is in windows, or on several grids.

    Examples:
        >>> import steadygaze as sg, torch
        >>> out = sg.outliers(sg.load_model("embedded"), torch.randn(2, 3, 32, 32))
        >>> print(out.advice[:17])
        No outlier tokens
    """
    inputs = prepare_inputs(model, images, transform)
    vit = _view(inputs.model)
    norms, attention = _walk(vit, inputs.images, on_progress=on_progress)
    mask, layer, first = high_patches(norms)
    query: Literal["class", "mean"] = "class" if _has_class_token(vit) else "mean"
    return Outliers(mask, norms, attention, layer, first, query, inputs.names, inputs.shown)


def find_registers(
    model: Any,
    images: Any,
    *,
    neurons: int = 10,
    count: int = 1,
    maximum: Maximum = "neuron",
    last_layer: int | None = None,
    transform: Callable[[Image.Image], Tensor] | None = None,
) -> Registers:
    """Find the register neurons of a model: those that are most active at outlier tokens.

    The score of a neuron is its mean |activation| at the outlier tokens of an image, averaged over the images
    that have any, as in the authors' `find_register_neurons`, where class tokens of high norm count too and
    thresholds are given by hand.

    Args:
        model: A vision transformer, its name, or the result of `load_model`.
        images: Images to find them on, as for `outliers`; some tens are enough.
        neurons: Number of neurons. The authors use 10 for CLIP ViT-B/16, and 50 for DINOv2 ViT-L/14.
        count: Number of added tokens.
        maximum: See `steadygaze.modules.Registers`.
        last_layer: The last block that is searched; by default the first one behind which outliers are high.
        transform: From a PIL image to a tensor (3, H, W), if the model does not declare it.

    Returns:
        The specification for `sg.modules.insert(model, registers=...)`. If the images have no outlier tokens
        it has neither neurons nor tokens, and changes nothing.

    Raises:
        UnsupportedModelError: If the MLPs of the model end in a layer that is not known.

    Examples:
        >>> import steadygaze as sg, torch
        >>> sg.find_registers(sg.load_model("embedded"), torch.randn(2, 3, 32, 32))
        Registers(neurons=(), count=0, maximum='neuron')
    """
    if isinstance(neurons, bool) or not isinstance(neurons, int) or not 1 <= neurons <= MAX_NEURONS:
        raise InputError(f"neurons: expected a number from 1 to {MAX_NEURONS}, got {neurons!r}")
    Registers(count=count, maximum=maximum)  # checks both
    inputs = prepare_inputs(model, images, transform)
    vit = _view(inputs.model)
    depth = len(vit.blocks)
    if last_layer is not None and not -depth <= last_layer < depth:
        raise InputError(f"last_layer: expected a block from 0 to {depth - 1}, got {last_layer!r}")
    norms, _ = _walk(vit, inputs.images, attention=False)
    mask, _, first = high_patches(norms)
    if first is None or count == 0:
        return Registers(count=0, maximum=maximum)
    layers = range((first if last_layer is None else last_layer % depth) + 1)
    with_any = mask.flatten(1).any(1)
    scores = _activity(vit, inputs.images[with_any.to(inputs.images.device)], mask[with_any], layers)
    width = max(len(layer) for layer in scores)
    table = torch.stack([torch.nn.functional.pad(s, (0, width - len(s)), value=-1.0) for s in scores])
    best = table.flatten().topk(min(neurons, sum(len(layer) for layer in scores))).indices.tolist()
    pairs = tuple((layers[place // width], place % width) for place in best)
    return Registers(neurons=pairs, count=count, maximum=maximum)


def high_patches(norms: Float[Tensor, "b l h w"]) -> tuple[Bool[Tensor, "b h w"], int, int | None]:
    """(outliers, the block where norms differ most, the first block with these outliers or None).

    Examples:
        >>> norms = torch.linspace(1, 1.1, 16).repeat(1, 3, 1).unflatten(2, (4, 4))
        >>> norms[0, 1, 2, 3], norms[0, 2, 2, 3] = 4, 9
        >>> mask, layer, first = high_patches(norms)
        >>> mask.nonzero().tolist(), layer, first
        ([[0, 2, 3]], 2, 1)
    """
    flat = norms.flatten(2).double()
    median = flat.median(-1, keepdim=True).values
    spread = 1.4826 * (flat - median).abs().median(-1, keepdim=True).values
    high = (flat >= RATIO * median) & (flat > median + SPREADS * spread)
    ratio = flat.amax(-1) / median[..., 0].clamp_min(torch.finfo(torch.float32).tiny)
    layer = int(ratio.mean(0).argmax())
    mask = high[:, layer]
    if not mask.any():
        return mask.unflatten(1, norms.shape[2:]), layer, None
    share = (high & mask[:, None]).sum((0, 2)) / mask.sum()
    first = layer
    while first > 0 and float(share[first - 1]) >= 0.5:
        first -= 1
    return mask.unflatten(1, norms.shape[2:]), layer, first


def _view(model: Any) -> ViT:
    vit = adapt(model)
    if not vit.plan.global_attention:
        raise MethodUnavailableError(
            f"a {vit.plan.kind} has no attention over all tokens (windows, reduced keys, several grids), and "
            "outlier tokens are defined by it. Use a model with attention over all tokens."
        )
    return vit


def _has_class_token(vit: ViT) -> bool:
    """Whether the first token is what the head reads."""
    return vit.readout == "class" and 0 in vit.plan.readout_rows and vit.prefix > 0


def _walk(
    vit: ViT, images: Tensor, *, attention: bool = True, on_progress: OnProgress = ignore_progress
) -> tuple[Float[Tensor, "b l h w"], Float[Tensor, "b l h w"]]:
    """Norms of the patches behind every block, and the share of attention that they get in it."""
    norms: list[Tensor] = []
    shares: list[Tensor] = []
    with without_autocast(vit.model), torch.no_grad(), evaluation_mode(vit.model):
        for some in vit.check(images).split(at_once(images)):
            on_progress(Progress("outliers", sum(map(len, norms)), len(images), "images"))
            x = vit.embed(some)
            layout = vit.layout(x)
            here: list[Tensor] = []
            received: list[Tensor] = []
            seam = Seam(want=Want(attention=attention))
            for number, block in enumerate(vit.blocks):
                with seam:
                    record = seam.next_record()
                    x = block(x)
                    seam.next_record()
                here.append(at_least_float32(vit.patches(number + 1, x, layout)).norm(dim=-1).cpu())
                if attention:
                    weights = _received(vit, record.attention, number)
                    received.append(vit.patches(number, weights[..., None], layout)[..., 0].cpu())
                del record
            norms.append(torch.stack(here, 1))
            if attention:
                shares.append(torch.stack(received, 1))
    on_progress(Progress("outliers", len(images), len(images), "images"))
    every = torch.cat(norms)
    if not attention:
        return every, torch.zeros_like(every)
    share = torch.cat(shares)
    return every, share / share.sum((2, 3), keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)


def _received(vit: ViT, attentions: list[Any], layer: int) -> Float[Tensor, "b n"]:
    """The attention that each token gets from the class token, or from all tokens where there is none."""
    if not attentions:
        raise MethodUnavailableError(f"block {layer} of this {vit.plan.kind} shows no attention")
    a = at_least_float32(torch.cat([attention.a for attention in attentions], 1)).mean(1)
    return a[:, 0] if _has_class_token(vit) else a.mean(1)


def _activity(
    vit: ViT, images: Tensor, mask: Bool[Tensor, "b h w"], layers: range
) -> list[Float[Tensor, " c"]]:
    """Mean |activation| at the outliers of an image, averaged over images: for each block and neuron."""
    totals: dict[int, Tensor] = {}

    def note(layer: int, outliers: Tensor) -> Callable[..., Any]:
        def answer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = at_least_float32(args[0] if args else next(iter(kwargs.values())))[:, vit.prefix :].abs()
            weights = outliers.to(hidden) / outliers.sum(1, keepdim=True).to(hidden)
            totals[layer] = totals.get(layer, 0) + torch.einsum("bn,bnc->c", weights, hidden)
            return call(*args, **kwargs)

        return answer

    modules = [last_linear(vit.blocks[layer].module) for layer in layers]
    size = at_once(images)
    with without_autocast(vit.model), torch.no_grad(), evaluation_mode(vit.model):
        for some, outliers in zip(images.split(size), mask.flatten(1).split(size), strict=True):
            x = vit.embed(some)
            with answered({m: note(layer, outliers) for layer, m in zip(layers, modules, strict=True)}):
                for layer in layers:
                    x = vit.blocks[layer](x)
    return [(totals[layer] / len(images)).cpu() for layer in layers]


def _enlarged(values: Float[Tensor, "h w"], size: tuple[int, int]) -> Float[np.ndarray, "hh ww"]:
    """A map on the grid, each patch as a rectangle, for an image of this width and height."""
    width, height = size
    grid = values.float().numpy()
    rows = (np.arange(height) * grid.shape[0] // height).clip(0, grid.shape[0] - 1)
    columns = (np.arange(width) * grid.shape[1] // width).clip(0, grid.shape[1] - 1)
    return grid[np.ix_(rows, columns)]


def _images(number: int) -> str:
    return f"{number} image" if number == 1 else f"{number} images"
