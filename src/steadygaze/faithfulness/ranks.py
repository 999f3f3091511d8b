"""Rank statistics with ties: average ranks, Spearman's ρ, AUROC, average precision.

Formulas: docs/equations.md#rank-statistics. All functions work along the last axis and agree with scipy and
scikit-learn.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def _tied_runs(ordered: Float[Tensor, "*b n"]) -> tuple[Int[Tensor, "*b n"], Int[Tensor, "*b n"]]:
    """First and last index of the run of equal values to which each entry of a sorted tensor belongs."""
    n = ordered.shape[-1]
    index = torch.arange(n, device=ordered.device).expand(ordered.shape)
    change = ordered[..., 1:] != ordered[..., :-1]
    edge = torch.ones_like(ordered[..., :1], dtype=torch.bool)
    first = torch.where(torch.cat([edge, change], -1), index, 0).cummax(-1).values
    last = torch.where(torch.cat([change, edge], -1), index, n).flip(-1).cummin(-1).values.flip(-1)
    return first, last


def ranks(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """Average ranks 1..n in float64; equal values share the mean of their ranks."""
    ordered, order = x.sort(dim=-1, stable=True)
    first, last = _tied_runs(ordered)
    average = (first + last).double() / 2 + 1
    return torch.empty_like(x, dtype=torch.float64).scatter_(-1, order, average)


def spearman(x: Float[Tensor, "*b n"], y: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Spearman's rank correlation, -1..1; NaN where either input is constant.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])).item()
    -1.0
    """
    a, b = (r - r.mean(-1, keepdim=True) for r in (ranks(x), ranks(y)))
    return ((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()).clamp(-1, 1)


def auroc(scores: Float[Tensor, "*b n"], positive: Bool[Tensor, " n"]) -> Float[Tensor, "*b"]:
    """Probability that a positive scores higher than a negative, ties count half; NaN without both kinds.

    >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])).item()
    0.75
    """
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return scores.new_full(scores.shape[:-1], float("nan"), dtype=torch.float64)
    return (ranks(scores)[..., positive].sum(-1) - p * (p + 1) / 2) / (p * n)


def average_precision(
    scores: Float[Tensor, "*b n"], positive: Bool[Tensor, "*b n"] | Bool[Tensor, " n"]
) -> Float[Tensor, "*b"]:
    """Σ_n (R_n − R_{n−1}) P_n over the distinct thresholds, 0..1; NaN without a positive.

    >>> average_precision(torch.tensor([0.1, 0.4, 0.3, 0.8]), torch.tensor([False, False, True, True])).item()
    0.8333333333333333
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    hit = positive.expand(scores.shape).gather(-1, order).double()
    _, last = _tied_runs(ordered)
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    precision = (hit.cumsum(-1) / count).gather(-1, last)
    return (hit * precision).sum(-1) / hit.sum(-1)
