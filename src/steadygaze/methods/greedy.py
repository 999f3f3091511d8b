"""Greedy searches for an order of the patches, by true removal.

f(S) is the explained quantity with only the patches S, V are all of them
(docs/equations.md#presence-vectors). Starting with S = ∅, each step adds to S the patch (region) with the
largest gain:

| name   | option         | added to S                                                            |
| greedy | by="insertion" | argmax_j f(S ∪ j)                                                     |
| greedy | by="deletion"  | argmin_j f(V ∖ (S ∪ j))                                               |
| greedy | by="joint"     | argmax_j f(S ∪ j) − f(V ∖ (S ∪ j))                                    |
| greedy | by="both"      | mean of the ranks of "insertion" and "deletion", half the budget each |
| smdl   |                | argmax_r of F(S ∪ r), see below                                       |

    F(S) = λ_conf (1 − H(p_S) / log C) + λ_eff Σ_{r ∈ S} min_{s ∈ S, s ≠ r} d_rs
           + λ_cons f(S) + λ_colla (1 − f(V ∖ S))

The map is the rank: P for the patch that was added first, 1 for the last one. Formulas:
docs/equations.md#greedy, docs/equations.md#smdl.

Source of smdl: Chen et al. 2024, "Less is More: Fewer Interpretable Region via Submodular Subset Selection".
H is the entropy of the predictions p_S over C classes, d_rs = arccos(cos(z_r, z_s)) / π the distance of the
outputs z of two regions alone. The weights are those of the authors' scripts for ViTs: conf 0, eff 0.05, cons
1, colla 1. Regions are square groups of patches, at most 64, in place of superpixels.

| symbol | variable                       |
| S ∪ j  | `keep`, `chosen` (of regions)  |
| V ∖ S  | `left`                         |
| λ      | `confidence`, `effectiveness`, `consistency`, `collaboration` |
| d      | `distance`                     |

`budget` counts forward passes. A step runs the model once for each remaining patch (twice for "joint" and
smdl), so that one patch at a time needs P (P + 1) / 2 − 1 passes (or twice as many). Where the budget is
smaller, each step adds the m best patches, m being the smallest number that fits.

greedy spends the share `swaps` of its budget on a local search: a patch before and one behind a limit k =
⌊P/10⌋, ⌊2P/10⌋, ..., ⌊9P/10⌋ of the order, drawn at random from the neighboring tenths, are exchanged if the
gain of the first k patches increases. Per pass that finds more than smaller steps of the greedy search do
(docs/evidence/ceiling.md).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import log, pi

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.methods.perturbation import BLACK_BOX, to_grid
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import check_budget, explained_values, hiding_mode, run_parts, uniform_draws
from steadygaze.target import at_least_float32, predictions
from steadygaze.trace.query import Query
from steadygaze.vit.removal import subset_logits

BY = ("joint", "insertion", "deletion", "both")
BUDGET = 2000
Gain = Callable[[Bool[Tensor, "b n r"]], Float[Tensor, "b n"]]  # of the sets S ∪ j, as presence vectors


def step_counts(patches: int, budget: int, passes: int) -> list[int]:
    """Numbers of remaining patches before each step of a search; at least one step, whatever it costs.

    Args:
        passes: Forward passes for each candidate.

    Examples:
        >>> step_counts(4, 9, 1), step_counts(4, 6, 1)
        ([4, 3, 2], [4, 2])
    """
    possible = (list(range(patches, 1, -m)) for m in range(1, max(patches, 2)))
    return next((counts for counts in possible if passes * sum(counts) <= budget), [patches])


class _Search:
    """A search for one image of a batch each: regions are added step by step, then swapped."""

    def __init__(self, query: Query, name: str, gain: Gain, regions: int, passes: int = 1) -> None:
        """passes: forward passes for each gain"""
        self.query, self.name, self.gain, self.passes = query, name, gain, passes
        self.order = torch.arange(regions, device=query.images.device).repeat(len(query.images), 1)

    def presence(self, sizes: Sequence[int]) -> Bool[Tensor, "b n r"]:
        """The first regions of the order, as presence vectors."""
        limits = torch.tensor(sizes, device=self.order.device)
        return self.order.argsort(dim=1)[:, None] < limits[:, None]

    def add(self, counts: Sequence[int]) -> bool:
        """Add regions, best first; interrupted (False), the others follow by their last gain.

        Args:
            counts: Numbers of remaining regions before each step.
        """

        def step(part: slice) -> Tensor:
            n = (part.stop - part.start) // self.passes
            left = self.order[:, -n:]
            chosen = self.presence([self.order.shape[1] - n]).repeat(1, n, 1)
            values = self.gain(chosen.scatter(2, left[..., None], True))
            self.order[:, -n:] = left.gather(1, values.argsort(dim=1, descending=True, stable=True))
            return values[:, :1]

        ends = [0, *accumulate(self.passes * count for count in counts)]
        parts = [slice(*ends) for ends in pairwise(ends)]
        return not parts or run_parts(self.query, self.name, parts, step).shape[1] == len(parts)

    def swap(self, budget: int, seed: int) -> None:
        """Exchange regions across the limits of tenths where that increases the gain of the set at the limit.

        A round tries one random exchange at every other limit: those do not affect one another.
        """
        regions = self.order.shape[1]
        limits = sorted({regions * tenth // 10 for tenth in range(1, 10)} - {0})
        bounds = torch.tensor([0, *limits, regions], device=self.order.device)
        count = max(0, 2 * (budget // self.passes - len(limits)) // max(1, len(limits)))
        rounds = [range(i % 2, len(limits), 2) for i in range(count) if i % 2 < len(limits)]
        ends = [
            end for end in accumulate([0, len(limits), *map(len, rounds)]) if end <= budget // self.passes
        ]
        if len(ends) < 3:
            return
        draws = iter(uniform_draws(self.query, seed, len(rounds), 2, len(limits)).to(bounds.device).unbind(1))
        tries = iter(rounds)
        values = torch.empty(0)

        def step(part: slice) -> Tensor:
            nonlocal values
            if part.start == 0:
                values = self.gain(self.presence(limits))
                return values[:, :1]
            tried = next(tries)
            at = torch.tensor(tried, device=bounds.device)
            low, middle, high = bounds[at], bounds[at + 1], bounds[at + 2]
            inside, outside = next(draws)[..., at].unbind(1)
            one = low + (inside * (middle - low)).long()  # places in the order, (b, tried)
            two = middle + (outside * (high - middle)).long()
            old, new = self.order.gather(1, one), self.order.gather(1, two)
            sets = self.presence([limits[i] for i in tried])
            sets = sets.scatter(2, old[..., None], False).scatter(2, new[..., None], True)
            found = self.gain(sets)
            better = found > values[:, at]
            values[:, at] = torch.where(better, found, values[:, at])
            self.order.scatter_(1, one, torch.where(better, new, old))
            self.order.scatter_(1, two, torch.where(better, old, new))
            return values[:, :1]

        slices = [slice(start * self.passes, stop * self.passes) for start, stop in pairwise(ends)]
        run_parts(self.query, f"{self.name}, swaps", slices, step, least=0)


def position_of(order: Int[Tensor, "b r"]) -> Int[Tensor, "b r"]:
    """The place of each region in an order, 0 is the first."""
    return order.argsort(dim=1)


class _Subsets:
    """What the model predicts with only some of the patches."""

    def __init__(self, query: Query, name: str, hide: str) -> None:
        self.query, self.mode = query, hiding_mode(query, name, hide)

    def logits(self, keep: Bool[Tensor, "b n p"]) -> Float[Tensor, "b n classes"]:
        """Outputs with the patches `keep`."""
        query, (batch, n, _) = self.query, keep.shape
        image = torch.arange(batch, device=keep.device).repeat_interleave(n)
        flat = subset_logits(query.vit, query.images, query.tokens, keep.flatten(0, 1), image, self.mode)
        return flat.unflatten(0, (batch, n))

    def f(self, keep: Bool[Tensor, "b n p"]) -> Float[Tensor, "b n"]:
        """The explained quantity."""
        return explained_values(self.query, self.logits(keep))


@register_method("greedy", "model", cost=float(BUDGET), **BLACK_BOX)
def greedy(
    query: Query,
    *,
    by: str = "joint",
    budget: int = BUDGET,
    swaps: float = 0.8,
    seed: int = 0,
    hide: str = "auto",
) -> Float[Tensor, "b h w"]:
    """Order that a greedy search by removal finds (by: "joint", "insertion", "deletion", "both").

    Args:
        budget: Number of forward passes.
        swaps: Share of the budget for exchanges after the greedy search.
    """
    if by not in BY:
        raise UnknownNameError("by", str(by), BY)
    if not 0 <= swaps < 1:
        raise InputError(f"greedy: expected a share of the budget, 0 <= swaps < 1, got {swaps!r}")
    p, f = query.patches, _Subsets(query, "greedy", hide).f
    gains: dict[str, tuple[int, Gain]] = {  # passes for each gain
        "insertion": (1, f),
        "deletion": (1, lambda keep: -f(~keep)),
        "joint": (2, lambda keep: f(keep) - f(~keep)),
    }
    kinds = ("insertion", "deletion") if by == "both" else (by,)
    budget = check_budget("greedy", budget) // len(kinds)
    positions = []
    for kind in kinds:
        passes, gain = gains[kind]
        counts = step_counts(p, int(budget * (1 - swaps)), passes)
        search = _Search(query, f"greedy {kind}", gain, p, passes)
        if search.add(counts) and swaps:
            search.swap(budget - passes * sum(counts), seed)
        positions.append(position_of(search.order))
    return to_grid(query, p - torch.stack(positions).double().mean(0))


def region_side(grid: tuple[int, int], regions: int) -> int:
    """Side of the smallest square regions, in patches, of which there are at most `regions`.

    Examples:
        >>> region_side((8, 8), 64), region_side((14, 14), 64)
        (1, 2)
    """
    sides = range(1, max(grid))
    return next((s for s in sides if -(-grid[0] // s) * -(-grid[1] // s) <= regions), max(grid))


@register_method("smdl", "model", cost=2.0 * BUDGET, **BLACK_BOX)
def smdl(
    query: Query,
    *,
    budget: int = 2 * BUDGET,
    regions: int = 64,
    confidence: float = 0.0,
    effectiveness: float = 0.05,
    consistency: float = 1.0,
    collaboration: float = 1.0,
    hide: str = "auto",
) -> Float[Tensor, "b h w"]:
    """Order of a greedy search that maximizes a submodular function of regions (SMDL).

    Args:
        budget: Number of forward passes.
        regions: At most this many regions.
    """
    height, width = query.grid
    side = region_side(query.grid, regions)
    rows, columns = torch.arange(height) // side, torch.arange(width) // side
    region = (
        (rows[:, None] * (int(columns[-1]) + 1) + columns).flatten().to(query.images.device)
    )  # of a patch
    count = int(region[-1]) + 1
    subsets = _Subsets(query, "smdl", hide)
    with torch.no_grad():
        alone = torch.eye(count, dtype=torch.bool, device=region.device)[:, region]
        z = F.normalize(subsets.logits(alone.expand(len(query.images), -1, -1)).double(), dim=2)
    distance = (z @ z.transpose(1, 2)).clamp(-1, 1).arccos() / pi
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)

    def gain(chosen: Bool[Tensor, "b n r"]) -> Float[Tensor, "b n"]:
        keep = chosen[..., region]
        logits = subsets.logits(keep)
        total = consistency * explained_values(query, logits).double()
        total = total + collaboration * (1 - subsets.f(~keep).double())
        if confidence:
            p = predictions(query.vit.plan.outputs, at_least_float32(logits)).double()
            total = total + confidence * (1 + (p * p.clamp_min(1e-12).log()).sum(-1) / log(p.shape[-1]))
        if effectiveness and chosen[0, 0].sum() > 1:
            apart = distance[:, None].masked_fill(~chosen[:, :, None], torch.inf).amin(-1)  # (b, n, r)
            total = total + effectiveness * apart.masked_fill(~chosen, 0.0).sum(-1)
        return total

    search = _Search(query, "smdl", gain, count, 2)
    search.add(step_counts(count, check_budget("smdl", budget) - count, 2))
    return to_grid(query, (count - position_of(search.order).double())[:, region])
