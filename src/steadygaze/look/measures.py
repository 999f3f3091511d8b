"""Measures of one layer's attention: entropy, overfocus and distance.

Formulas: docs/equations.md#attention-entropy.

A is (B, heads, queries, keys) after softmax; rows sum to 1, except in windows with padding.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.target import at_least_float32

TOP = 5  # tokens that overfocus counts


def entropy(a: Float[Tensor, "b heads n k"]) -> Float[Tensor, "b heads"]:
    """Mean entropy of the rows, in nats.

    Examples:
        >>> entropy(torch.full((1, 1, 4, 4), 0.25)).item() == torch.tensor(4.0).log().item()
        True
    """
    a = at_least_float32(a)
    return -torch.special.xlogy(a, a).sum(-1).mean(-1)


def overfocus(a: Float[Tensor, "b heads n k"], top: int = TOP) -> Float[Tensor, "b heads"]:
    """Share of all attention that the `top` most attended tokens get."""
    if not 1 <= top <= a.shape[-1]:
        raise InputError(f"top: expected a number of tokens from 1 to {a.shape[-1]}, got {top!r}")
    return at_least_float32(a).mean(-2).topk(top, dim=-1).values.sum(-1)


def distances(grid: tuple[int, int], keys: tuple[int, int] | None = None) -> Float[Tensor, "p q"]:
    """Distance between every patch and every key, in patches.

    Args:
        grid: Rows and columns of the patches.
        keys: Rows and columns of reduced keys, each at the middle of the patches that it covers; None: the
            patches themselves.

    Examples:
        >>> distances((1, 4), keys=(1, 2))[0]
        tensor([0.5000, 2.5000], dtype=torch.float64)
    """
    here, there = _centers(grid, grid), _centers(keys or grid, grid)
    return torch.linalg.vector_norm(here[:, None] - there[None], dim=-1)


def _centers(cells: tuple[int, int], grid: tuple[int, int]) -> Float[Tensor, "n 2"]:
    """Centers of cells that divide a grid evenly, in patches."""
    axes = [
        (torch.arange(count, dtype=torch.float64) + 0.5) * (size / count) - 0.5
        for count, size in zip(cells, grid, strict=True)
    ]
    return torch.cartesian_prod(*axes).view(-1, 2)


def distance(a: Float[Tensor, "b heads n k"], far: Float[Tensor, "p q"]) -> Float[Tensor, "b heads"]:
    """Mean distance from a patch to the patches it attends to, in patches; prefix tokens are left out."""
    queries, keys = far.shape
    patches = at_least_float32(a)[..., -queries:, -keys:]
    share = patches / patches.sum(-1, keepdim=True).clamp_min(torch.finfo(patches.dtype).tiny)
    return (share * far.to(share)).sum(-1).mean(-1)
