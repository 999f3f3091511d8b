"""Greedy searches for an order of the patches, by true removal.

f(S) is the explained quantity with only the patches S, V are all patches (docs/equations.md#presence-vectors).
Starting with S = ∅, each step adds to S the patch (region) with the largest gain:

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
1, colla 1. Regions are square groups of patches, in place of superpixels: as small as the budget allows.

| symbol | variable                       |
| S ∪ j  | `keep`, `chosen` (of regions)  |
| V ∖ S  | `left`                         |
| λ      | `confidence`, `effectiveness`, `consistency`, `collaboration` |
| d      | `distance`                     |

`budget` counts forward passes. A step runs the model once for each remaining patch (twice for "joint" and
smdl), so that one patch at a time needs P (P + 1) / 2 − 1 passes (or twice as many). Where the budget of
greedy is smaller, each step adds the m best patches, m being the smallest number that fits the budget.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import log, pi

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.errors import UnknownNameError
from steadygaze.methods.perturbation import BLACK_BOX, to_grid
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import check_budget, explained_values, hiding_mode, run_parts
from steadygaze.target import at_least_float32, predictions
from steadygaze.trace.query import Query
from steadygaze.vit.removal import subset_logits

BY = ("both", "insertion", "deletion", "joint")
BUDGET = 5000  # enough for one patch at a time on 8 x 8 patches
Gain = Callable[[Bool[Tensor, "b n r"]], Float[Tensor, "b n"]]  # of the sets S ∪ j, as presence vectors


def step_counts(patches: int, budget: int, passes: int) -> list[int]:
    """Numbers of remaining patches before each step of a search within a budget.

    Args:
        passes: Forward passes for each candidate.

    Examples:
        >>> step_counts(4, 9, 1), step_counts(4, 6, 1)
        ([4, 3, 2], [4, 2])
    """
    for m in range(1, patches + 1):
        counts = list(range(patches, 1, -m))
        if passes * sum(counts) <= budget or m == patches:
            return counts
    return []


def search_order(
    query: Query, name: str, gain: Gain, regions: int, counts: list[int], passes: int = 1
) -> Int[Tensor, "b r"]:
    """Regions in the order in which the search adds them; interrupted, the others follow by their last gain.

    Args:
        counts: Numbers of remaining regions before each step.
        passes: Forward passes for each candidate.
    """
    batch, device = len(query.images), query.images.device
    left = torch.arange(regions, device=device).repeat(batch, 1)
    chosen = torch.zeros(batch, regions, dtype=torch.bool, device=device)
    remaining = iter([*counts[1:], 0])

    def step(part: slice) -> Int[Tensor, "b m"]:
        nonlocal left
        candidates = chosen[:, None].repeat(1, left.shape[1], 1).scatter(2, left[..., None], True)
        best_first = gain(candidates).argsort(dim=1, descending=True, stable=True)
        taken, left = left.gather(1, best_first).tensor_split([left.shape[1] - next(remaining)], dim=1)
        chosen.scatter_(1, taken, True)
        return taken

    ends = [0, *accumulate(passes * count for count in counts)]
    order = run_parts(query, name, [slice(*ends) for ends in pairwise(ends)], step)
    return torch.cat([order.to(left), left], 1)


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
    query: Query, *, by: str = "both", budget: int = BUDGET, hide: str = "auto"
) -> Float[Tensor, "b h w"]:
    """Order of a greedy search by removal (by: "both", "insertion", "deletion", "joint"; budget: passes)."""
    if by not in BY:
        raise UnknownNameError("by", str(by), BY)
    p = query.patches
    budget = check_budget("greedy", budget, 2 * p if by in ("both", "joint") else p)
    f = _Subsets(query, "greedy", hide).f
    gains: dict[str, Gain] = {
        "insertion": f,
        "deletion": lambda keep: -f(~keep),
        "joint": lambda keep: f(keep) - f(~keep),
    }
    positions = []
    for kind in ("insertion", "deletion") if by == "both" else (by,):
        passes = 2 if kind == "joint" else 1
        counts = step_counts(p, budget // 2 if by == "both" else budget, passes)
        order = search_order(query, f"greedy {kind}", gains[kind], p, counts, passes)
        positions.append(position_of(order))
    return to_grid(query, p - torch.stack(positions).double().mean(0))


def region_side(grid: tuple[int, int], budget: int) -> int:
    """Side of the smallest square regions, in patches, that a search of one region at a time can afford.

    Examples:
        >>> region_side((8, 8), 5000), region_side((14, 14), 5000)
        (1, 2)
    """
    for side in range(1, max(grid)):
        regions = -(-grid[0] // side) * -(-grid[1] // side)
        if regions + 2 * sum(range(regions, 1, -1)) <= budget:
            return side
    return max(grid)


@register_method("smdl", "model", cost=float(BUDGET), **BLACK_BOX)
def smdl(
    query: Query,
    *,
    budget: int = BUDGET,
    confidence: float = 0.0,
    effectiveness: float = 0.05,
    consistency: float = 1.0,
    collaboration: float = 1.0,
    hide: str = "auto",
) -> Float[Tensor, "b h w"]:
    """Order of a greedy search that maximizes a submodular function of regions (SMDL; budget: passes)."""
    height, width = query.grid
    side = region_side(query.grid, check_budget("smdl", budget, 1))
    rows, columns = torch.arange(height) // side, torch.arange(width) // side
    region = (rows[:, None] * (int(columns[-1]) + 1) + columns).flatten().to(query.images.device)  # of a patch
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

    order = search_order(query, "smdl", gain, count, list(range(count, 1, -1)), 2)
    return to_grid(query, (count - position_of(order).double())[:, region])
