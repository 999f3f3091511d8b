"""Refining a coarse mask to the edges of its image: the fast bilateral solver (Barron and Poole 2016).

Equations: docs/equations.md#bilateral-solver. Pixels close in position and colour share a vertex of a coarse
grid in five dimensions (y, x, luma, two of chroma). On the vertices,

    minimise  λ/2 Σ_ij Ŵ_ij (y_i − y_j)² + Σ_i c_i (y_i − t_i)²,   that is
    (λ (D_m − D_n B D_n) + diag(S c)) y = S (c t)

| symbol   | variable           | meaning                                                          |
| Ŵ, B     | `blur`             | the blur between neighbours, made bistochastic by D_n            |
| D_n, D_m | scale, mass        | diagonal matrices                                                |
| S        | `splat`            | sum over the pixels of a vertex                                  |
| t        | target             | the mask                                                         |
| c, λ     | CONFIDENCE, SMOOTHNESS | the confidence in the mask, and the weight of smoothness     |
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import ndimage
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

RGB_TO_YUV = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
SPATIAL, LUMA, CHROMA = 16, 16, 8  # size of a vertex in pixels, and in values of 0..255
SMOOTHNESS, CONFIDENCE = 256.0, 0.999
ITERATIONS, TOLERANCE = 25, 1e-5
MIN_OVERLAP = 0.5  # IoU with the given mask; a refined mask below it has lost the object

Array = np.ndarray


def refine(mask: Bool[Tensor, "h w"], image: Float[Tensor, "3 h w"]) -> Bool[Tensor, "h w"]:
    """The mask moved to the edges of the image (RGB, 0..1): its largest connected component, with holes
    filled.

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
    """The target, smooth where the image is and sharp at its edges, by preconditioned conjugate gradients;
    float64, on the CPU."""
    vertex, neighbours = _grid(image.double().cpu().numpy())
    directions, count = neighbours.shape

    def splat(values: Array) -> Array:
        return np.bincount(vertex, weights=values, minlength=count)

    def blur(y: Array) -> Array:
        return directions * y + np.append(y, 0.0)[neighbours].sum(0)  # a missing neighbour is 0

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
    """The vertex of every pixel; the neighbours of every vertex, one up and one down in each dimension (none:
    the count)."""
    colour = np.einsum("kc,chw->khw", RGB_TO_YUV, image * 255)
    colour[1:] += 128
    y, x = np.indices(image.shape[1:])
    position = np.stack([y / SPATIAL, x / SPATIAL, colour[0] / LUMA, colour[1] / CHROMA, colour[2] / CHROMA])
    cells = position.reshape(5, -1).astype(np.int64) + 1  # room for a neighbour below
    sizes = cells.max(1) + 2  # and above
    strides = np.append(sizes[:0:-1].cumprod()[::-1], 1)
    keys, vertex = np.unique(strides @ cells, return_inverse=True)
    wanted = keys + np.concatenate([strides, -strides])[:, None]
    position_in_keys = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return vertex, np.where(keys[position_in_keys] == wanted, position_in_keys, len(keys))


def component_at(inside: Bool[Array, "h w"], index: int) -> Bool[Array, "h w"]:
    """The connected component (four neighbours) that holds the pixel of a flat index.

    >>> component_at(np.array([[True, False, True]]), 0).tolist()
    [[True, False, False]]
    """
    labels, _ = ndimage.label(inside)
    return (labels == labels.flat[index]) & inside


def largest_component(inside: Bool[Array, "h w"]) -> Bool[Array, "h w"]:
    """The largest connected component (four neighbours), the first of several; empty if there is none."""
    labels, count = ndimage.label(inside)
    if not count:
        return np.zeros_like(inside)
    return labels == 1 + np.bincount(labels.ravel())[1:].argmax()
