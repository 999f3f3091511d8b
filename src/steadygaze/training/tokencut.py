"""TokenCut: object masks without labels, from the keys of a ViT's last block (Wang et al. 2022).

Equations: docs/equations.md#tokencut.

    F_i = key of patch i, heads concatenated, of length 1         W_ij = 1 if F_i·F_j > τ else ε
    (D − W) v = λ D v, v the eigenvector of the second smallest λ
    object: v > mean v, on the side of argmax |v|

Only the connected component (four neighbors) with argmax |v| is kept. The keys of any ViT can be used; the
authors use DINO ViT-B/16. The keys of models trained with labels have a large common part, so that all of
them are similar at τ: `centered` subtracts each image's mean key, which changes no attention (softmax over
keys is invariant to it). The edges follow the image after `refine`; the authors' script keeps the second
largest component of the solver's result, background included, and in effect drops images where that is not
the object: here the largest one is kept, or the coarse mask.

`refine` moves a coarse mask to the edges of its image: the fast bilateral solver (Barron and Poole 2016).

Equations: docs/equations.md#bilateral-solver. Pixels close in position and color share a vertex of a coarse
grid in five dimensions (y, x, luma, two of chroma). On the vertices,

    minimize  λ/2 Σ_ij Ŵ_ij (y_i − y_j)² + Σ_i c_i (y_i − t_i)²,   that is
    (λ (D_m − D_n B D_n) + diag(S c)) y = S (c t)

| symbol   | variable           | meaning                                                          |
| Ŵ, B     | `blur`             | the blur between neighbors, made bistochastic by D_n            |
| D_n, D_m | scale, mass        | diagonal matrices                                                |
| S        | `splat`            | sum over the pixels of a vertex                                  |
| t        | target             | the mask                                                         |
| c, λ     | CONFIDENCE, SMOOTHNESS | the confidence in the mask, and the weight of smoothness     |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import ndimage
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn

from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.trace import Seam, Want
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import Block, ViT, layout_of, remember

RGB_TO_YUV = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
SPATIAL, LUMA, CHROMA = 16, 16, 8  # size of a vertex in pixels, and in values of 0..255
SMOOTHNESS, CONFIDENCE = 256.0, 0.999
ITERATIONS, TOLERANCE = 25, 1e-5
MIN_OVERLAP = 0.5  # IoU with the given mask; a refined mask below it has lost the object

Array = np.ndarray


def refine(mask: Bool[Tensor, "h w"], image: Float[Tensor, "3 h w"]) -> Bool[Tensor, "h w"]:
    """Move a mask to the edges of the image (RGB, 0..1): the largest component, with holes filled.

    The given mask is returned if the object is lost.
    """
    inside = ndimage.binary_fill_holes(solve(mask.double(), image).numpy() > 0.5)
    refined = torch.from_numpy(largest_component(inside)).to(mask.device)
    overlap = (refined & mask).sum() / (refined | mask).sum().clamp(min=1)
    return refined if overlap >= MIN_OVERLAP else mask


def solve(
    target: Float[Tensor, "h w"],
    image: Float[Tensor, "3 h w"],
    *,
    iterations: int = ITERATIONS,
    tolerance: float = TOLERANCE,
) -> Float[Tensor, "h w"]:
    """Smooth the target where the image is smooth, by preconditioned conjugate gradients in float64."""
    vertex, neighbors = _grid(image.double().cpu().numpy())
    directions, count = neighbors.shape

    def splat(values: Array) -> Array:
        return np.bincount(vertex, weights=values, minlength=count)

    def blur(y: Array) -> Array:
        return directions * y + np.append(y, 0.0)[neighbors].sum(0)  # a missing neighbor is 0

    def apply(y: Array) -> Array:
        return SMOOTHNESS * (mass * y - scale * blur(scale * y)) + confidence * y

    pixels = splat(np.ones(target.numel()))
    scale = np.ones(count)
    for _ in range(10):
        scale = np.sqrt(scale * pixels / blur(scale))
    mass, confidence = scale * blur(scale), CONFIDENCE * pixels
    start = splat(target.double().cpu().numpy().ravel()) / pixels
    diagonal = (SMOOTHNESS * (mass - directions * scale**2) + confidence).clip(min=1e-5)
    system = LinearOperator((count, count), matvec=apply, dtype=np.float64)
    preconditioner = LinearOperator((count, count), matvec=lambda y: y / diagonal, dtype=np.float64)
    y, _ = cg(
        system, confidence * start, start, rtol=tolerance, atol=0.0, maxiter=iterations, M=preconditioner
    )
    return torch.from_numpy(y[vertex].reshape(tuple(target.shape)))


def _grid(image: Float[Array, "3 h w"]) -> tuple[Int[Array, " hw"], Int[Array, "ten v"]]:
    """The vertex of every pixel; the neighbors of every vertex in each dimension (none: the count)."""
    color = np.einsum("kc,chw->khw", RGB_TO_YUV, image * 255)
    color[1:] += 128
    y, x = np.indices(image.shape[1:])
    position = np.stack([y / SPATIAL, x / SPATIAL, color[0] / LUMA, color[1] / CHROMA, color[2] / CHROMA])
    cells = position.reshape(5, -1).astype(np.int64) + 1  # room for a neighbor below
    sizes = cells.max(1) + 2  # and above
    strides = np.append(sizes[:0:-1].cumprod()[::-1], 1)
    keys, vertex = np.unique(strides @ cells, return_inverse=True)
    wanted = keys + np.concatenate([strides, -strides])[:, None]
    position_in_keys = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return vertex, np.where(keys[position_in_keys] == wanted, position_in_keys, len(keys))


def component_at(inside: Bool[Array, "h w"], index: int) -> Bool[Array, "h w"]:
    """The connected component (four neighbors) that holds the pixel of a flat index.

    Examples:
        >>> component_at(np.array([[True, False, True]]), 0).tolist()
        [[True, False, False]]
    """
    labels, _ = ndimage.label(inside)
    return (labels == labels.flat[index]) & inside


def largest_component(inside: Bool[Array, "h w"]) -> Bool[Array, "h w"]:
    """The largest connected component (four neighbors), the first of several; empty if there is none."""
    labels, count = ndimage.label(inside)
    if not count:
        return np.zeros_like(inside)
    return labels == 1 + np.bincount(labels.ravel())[1:].argmax()


TAU, EPSILON = 0.2, 1e-5


class _KeySeam(Seam):
    """Records the keys of the last attention: fused, or computed eagerly as softmax(q kᵀ)."""

    def __init__(self) -> None:
        super().__init__(want=Want(hidden=False))
        self.keys: Tensor | None = None
        self.right_factor: Tensor | None = None  # of the last matrix product, transposed

    def sdpa(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.keys = k
        return func(q, k, v, *args, **kwargs)

    def matmul(self, func: Any, a: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if a.dim() == 4 and v.dim() == 4 and not hasattr(a, "attention_"):
            self.right_factor = v.transpose(-2, -1)
        return super().matmul(func, a, v, **kwargs)

    def softmax(self, func: Any, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        y = super().softmax(func, x, dim, *args, **kwargs)
        keys = self.right_factor
        if hasattr(y, "attention_") and keys is not None and keys.shape[-2] == x.shape[-1]:
            self.keys = keys
        return y


def last_keys(model: nn.Module | ViT, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b gh gw d"]:
    """The keys of the last block on the patch grid, heads concatenated, windows joined, without prefix."""
    vit = adapt(model)
    with torch.no_grad(), evaluation_mode(vit.model):
        x = vit.embed(images)
        layout, last = vit.layout(x), vit.blocks[-1]
        for block in vit.blocks[:-1]:
            x = block(x)
        keys = _block_keys(last, x)
        if keys is None or keys.shape[1] < x.shape[1]:
            raise MethodUnavailableError(
                f"tokencut: the last block of this {vit.plan.kind} has no key for each patch. "
                "Use a plain ViT."
            )
        if not vit.plan.global_attention:
            keys = keys[:, _key_of_token(last, x)]
    return last.patches(keys, layout)


def _block_keys(block: Block, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b m e"] | None:
    """The keys of a block for each image, in the order its attention takes them (window after window)."""
    with _KeySeam() as seam:
        block(x)
    k = seam.keys
    if k is None or len(k) % len(x):
        return None
    heads_joined = k.transpose(1, 2).flatten(2)
    return heads_joined.unflatten(0, (len(x), -1)).flatten(1, 2)


def _key_of_token(block: Block, x: Float[Tensor, "b n d"]) -> Int[Tensor, " n"]:
    """The index of each token's key: the one that changes with the token, which keys of padding do not."""
    count = x.shape[1]
    noise = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
    changed_tokens = x[:1].repeat(count + 1, 1, 1)
    changed_tokens[torch.arange(count) + 1, torch.arange(count)] += noise
    keys = _block_keys(block, remember(changed_tokens, layout_of(x, block.plan)))
    assert keys is not None
    difference = (keys[1:] - keys[:1]).abs().amax(-1)  # (token, key)
    changed = difference > 1e-3 * difference.amax()
    if not ((changed.sum(0) <= 1).all() and (changed.sum(1) == 1).all()):
        raise MethodUnavailableError(
            f"tokencut: in the last block of this {block.plan.kind} a key is made of several patches. "
            "Use a plain ViT."
        )
    return changed.int().argmax(1)


def tokencut(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    *,
    tau: float = TAU,
    epsilon: float = EPSILON,
    centered: bool = False,
) -> Bool[Tensor, "b gh gw"]:
    """The patches of the object; never empty."""
    if not -1 <= tau <= 1 or not epsilon > 0:
        raise InputError(f"tokencut: expected tau in -1..1 and epsilon above 0, got {tau} and {epsilon}")
    keys = last_keys(model, images)
    keys = keys - keys.mean((1, 2), keepdim=True) if centered else keys
    return torch.stack([normalized_cut(image_keys, tau=tau, epsilon=epsilon) for image_keys in keys])


def normalized_cut(
    features: Float[Tensor, "gh gw d"], *, tau: float = TAU, epsilon: float = EPSILON
) -> Bool[Tensor, "gh gw"]:
    """The normalized cut of one image's patches, on the side with the most distinct one."""
    height, width, _ = features.shape
    if height * width < 2:
        raise InputError(f"tokencut: expected at least two patches, got a grid of {height}x{width}")
    f = nn.functional.normalize(features.flatten(0, 1).double(), dim=-1)
    w = torch.where(f @ f.T > tau, 1.0, epsilon).to(f)
    scale = w.sum(1).rsqrt()  # D^-1/2 (D − W) D^-1/2 u = λ u with u = D^1/2 v
    laplacian = torch.eye(len(w), dtype=w.dtype, device=w.device) - scale[:, None] * w * scale
    v = scale * torch.linalg.eigh(laplacian).eigenvectors[:, 1]
    most_distinct = int(v.abs().argmax())
    inside = v > v.mean()
    if not inside[most_distinct]:
        inside = ~inside
    component = component_at(inside.view(height, width).cpu().numpy(), most_distinct)
    return torch.from_numpy(component).to(features.device)


def tokencut_masks(
    model: nn.Module,
    items: Sequence[Item],
    preprocess: Preprocess,
    *,
    refined: bool = False,
    centered: bool = False,
    batch_size: int = 16,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, Tensor]:
    """Name -> mask (255 object, 0 background) of every image, resized to the model's size, not cropped.

    Args:
        refined: Masks of pixels with the edges of the image (`refine`), not of patches.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    vit, device = adapt(model), next(model.parameters()).device
    size, interpolation = list(preprocess.size), InterpolationMode(preprocess.interpolation)
    masks: dict[str, Tensor] = {}
    on_progress(Progress("TokenCut masks", 0, len(items), "images"))
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        resized = [F.resize(read_image(item.source), size, interpolation) for item in batch]
        pixels = torch.stack([F.pil_to_tensor(image) for image in resized])
        cuts = tokencut(vit, preprocess.normalize(pixels).to(device), centered=centered).cpu()
        if refined:
            coarse = nn.functional.interpolate(cuts[:, None].float(), size=size, mode="nearest")[:, 0] > 0.5
            cuts = torch.stack(
                [refine(mask, image) for mask, image in zip(coarse, pixels / 255, strict=True)]
            )
        masks |= {item.name: mask.to(torch.uint8) * 255 for item, mask in zip(batch, cuts, strict=True)}
        on_progress(Progress("TokenCut masks", len(masks), len(items), "images"))
    return masks
