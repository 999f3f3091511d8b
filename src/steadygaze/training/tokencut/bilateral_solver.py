"""Edges of a coarse mask drawn to those of its picture: the fast bilateral solver (Barron and Poole 2016;
docs/equations.md#bilateral-solver).

Pixels alike in place and colour share a vertex of a coarse grid in five dimensions (y, x, luma, two of chroma). On the vertices,

    minimise  λ/2 Σ_ij Ŵ_ij (y_i − y_j)² + Σ_i c_i (y_i − t_i)²       that is  (λ (D_m − D_n B D_n) + diag(S c)) y = S (c t)

with Ŵ the blur B between neighbours made bistochastic by D_n, S the sum over a vertex's pixels, t the mask and c the trust in it.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

YUV = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
SPATIAL, LUMA, CHROMA = 16, 16, 8  # pixels, and values of 0..255, that share a vertex
SMOOTHNESS, TRUST = 256.0, 0.999
STEPS, TOLERANCE = 25, 1e-5
SAME = 0.5  # a refined mask that overlaps less with the one given (IoU) has lost the object


def refine(mask: Bool[Tensor, "h w"], picture: Float[Tensor, "3 h w"]) -> Bool[Tensor, "h w"]:
    """The largest piece, holes filled, of the mask that follows the picture (RGB, 0..1); the given one where the object is lost."""
    inside = solve(mask.double(), picture) > 0.5
    found = _largest(_filled(inside))
    overlap = (found & mask).sum() / (found | mask).sum().clamp(min=1)
    return found if overlap >= SAME else mask


def solve(target: Float[Tensor, "h w"], picture: Float[Tensor, "3 h w"], *, steps: int = STEPS,
          tolerance: float = TOLERANCE) -> Float[Tensor, "h w"]:  # fmt: skip
    """The target, smooth where the picture is and sharp at its edges; conjugate gradients with the diagonal as preconditioner."""
    vertex, neighbours = _grid(picture)
    count = neighbours.shape[1]

    def splat(values: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(
            0, vertex, values.flatten().double()
        )

    def blur(y: Tensor) -> Tensor:
        return len(neighbours) * y + torch.nn.functional.pad(y, (0, 1))[neighbours].sum(
            0
        )  # a missing neighbour is 0

    pixels = splat(torch.ones_like(target))
    scale = torch.ones_like(pixels)
    for _ in range(10):
        scale = (scale * pixels / blur(scale)).sqrt()
    mass, trust = scale * blur(scale), TRUST * pixels
    start = splat(target) / pixels
    diagonal = SMOOTHNESS * (mass - len(neighbours) * scale.square()) + trust
    y = _conjugate(lambda v: SMOOTHNESS * (mass * v - scale * blur(scale * v)) + trust * v,
                   trust * start, start, diagonal.clamp(min=1e-5), steps, tolerance)  # fmt: skip
    return y[vertex].view(target.shape)


def _grid(picture: Float[Tensor, "3 h w"]) -> tuple[Int[Tensor, " hw"], Int[Tensor, "ten v"]]:
    """The vertex of every pixel; and the neighbours of every vertex, one lower and one higher in each dimension (none: the count)."""
    _, height, width = picture.shape
    colour = torch.einsum(
        "kc,chw->khw", torch.tensor(YUV, dtype=torch.float64, device=picture.device), picture.double() * 255
    )
    colour[1:] += 128
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack(
        [
            y.to(colour) / SPATIAL,
            x.to(colour) / SPATIAL,
            colour[0] / LUMA,
            colour[1] / CHROMA,
            colour[2] / CHROMA,
        ]
    )
    cells = places.flatten(1).long() + 1  # room for a neighbour below
    sizes = cells.amax(1) + 2  # and above
    weights = torch.cat([sizes.flip(0)[:-1].cumprod(0).flip(0), sizes.new_ones(1)])
    keys, vertex = torch.unique((cells * weights[:, None]).sum(0), return_inverse=True)
    wanted = keys + torch.cat([weights, -weights])[:, None]
    found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return vertex, torch.where(keys[found] == wanted, found, len(keys))


def _conjugate(
    apply: Callable[[Tensor], Tensor],
    wanted: Tensor,
    y: Tensor,
    diagonal: Tensor,
    steps: int,
    tolerance: float,
) -> Tensor:
    """apply(y) = wanted, for a symmetric positive `apply`."""
    rest = wanted - apply(y)
    z = rest / diagonal
    way, power = z, rest @ z
    for _ in range(steps):
        if rest.norm() <= tolerance * wanted.norm():
            break
        moved = apply(way)
        step = power / (way @ moved)
        y, rest = y + step * way, rest - step * moved
        z = rest / diagonal
        before, power = power, rest @ z
        way = z + power / before * way
    return y


def piece_of(inside: Bool[Tensor, "h w"], seed: int | Tensor) -> Bool[Tensor, "h w"]:
    """What is connected (four neighbours) with place `seed`, or with several places.

    >>> piece_of(torch.tensor([[True, False, True]]), 0).tolist()
    [[True, False, False]]
    """
    found = torch.zeros_like(inside)
    found.view(-1)[seed] = True
    found &= inside
    while True:
        grown = found.clone()
        grown[1:] |= found[:-1]
        grown[:-1] |= found[1:]
        grown[:, 1:] |= found[:, :-1]
        grown[:, :-1] |= found[:, 1:]
        grown &= inside
        if torch.equal(grown, found):
            return found
        found = grown


def _filled(inside: Bool[Tensor, "h w"]) -> Bool[Tensor, "h w"]:
    """Without holes: all that the outside does not reach from the border."""
    border = torch.zeros_like(inside)
    border[0], border[-1], border[:, 0], border[:, -1] = True, True, True, True
    return ~piece_of(~inside, border.flatten().nonzero()[:, 0])


def _largest(inside: Bool[Tensor, "h w"]) -> Bool[Tensor, "h w"]:
    """The largest connected piece."""
    best, left = torch.zeros_like(inside), inside.clone()
    while left.sum() > best.sum():
        piece = piece_of(left, int(left.flatten().int().argmax()))
        best = piece if piece.sum() > best.sum() else best
        left &= ~piece
    return best
