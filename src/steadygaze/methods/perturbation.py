"""Black-box methods on subsets of patches.

A presence vector z ∈ {0,1}^P says which patches are kept; f(z) is the explained quantity with only those
(docs/equations.md#presence-vectors).

| name        | runs                                 | s_j                                           |
| occlusion   | all, and all without j               | f(all) − f(all∖j)                             |
| rise        | each patch kept with probability 1/2 | Σ_m f(z^m) z^m_j / Σ_m z^m_j                  |
| lime        | all, and as rise                     | coefficient j of a weighted ridge, λ = 1      |
| kernel_shap | all, none, pairs (z, 1 − z)          | least squares with Σ_j s_j = f(all) − f(none) |
| pami        | one cell of a grid, several grids    | mean f over the cells that hold j             |
| hsic        | as rise                              | tr(K_j H L H) / (M − 1)²                      |

Zeiler & Fergus 2014 (occlusion), Petsiuk et al. 2018 (RISE), Ribeiro et al. 2016 (LIME), Lundberg & Lee 2017
(KernelSHAP), Shi et al. 2023 (PAMI), Novello et al. 2022 (HSIC).

lime weights runs by exp(−d²/σ²), d = 1 − cos(z, 1) = 1 − √(|z|/P), σ = 0.25. The Shapley kernel's mass at
size s, over all sets of that size, is ∝ 1/(s (P − s)): sizes are drawn by it, so that samples have equal
weights. In hsic K_j is the Dirac kernel of z_j and L the RBF kernel of f, its width the median distance.

f is the probability of the class (score="prob") unless another score is requested. Hidden patches are
removed (see `vit.removal`), which makes these methods fast: a run with half of the patches costs half.
`budget` counts runs. The list of runs starts the same whatever its length, so that a smaller budget, or an
interrupted search, is a prefix of a longer one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steadygaze.errors import UnknownNameError
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import check_budget, evaluate_subsets, explained_values, uniform_draws
from steadygaze.target import at_least_float32, predictions
from steadygaze.trace.completeness import Shares
from steadygaze.trace.query import Query

PATCHES = 196  # of the usual 14 x 14 grid, for the listed costs
SIGMA, RIDGE = 0.25, 1.0
BLACK_BOX: dict[str, Any] = {
    "family": "black box",
    "gradient": False,
    "class_specific": True,
    "score": "prob",
}


def to_grid(query: Query, scores: Float[Tensor, "b p"]) -> Float[Tensor, "b h w"]:
    """Scores as a map on the model's device, in its precision but at least float32.

    float16 cannot represent the probability of a rare class.
    """
    dtype = torch.promote_types(query.images.dtype, torch.float32)
    return scores.to(query.images.device, dtype).unflatten(1, query.grid)


def spread_order(n: int) -> list[int]:
    """0..n−1 in a fixed shuffled order, so that the first few are spread over the image."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()


def fill_missing(values: Float[Tensor, "b r"], order: list[int], n: int) -> Float[Tensor, "b n"]:
    """values[:, i] belongs to patch order[i]; patches that were not measured get the mean of the others."""
    scores = values.mean(1, keepdim=True).repeat(1, n)
    scores[:, order[: values.shape[1]]] = values
    return scores


def mean_where_kept(f: Float[Tensor, "b m"], z: Float[Tensor, "b m p"]) -> Float[Tensor, "b p"]:
    """Σ_m f_m z_mj / Σ_m z_mj.

    A patch that no run has kept yet gets the mean of the runs that kept any: zero would be evidence against
    it.
    """
    weight, some = z.sum(1), (z > 0).any(2).to(f)
    scores = torch.einsum("bm,bmp->bp", f, z) / weight.clamp_min(torch.finfo(f.dtype).tiny)
    mean = (f * some).sum(1) / some.sum(1).clamp_min(1)
    return torch.where(weight > 0, scores, mean[:, None])


@register_method("occlusion", "model", cost=PATCHES + 1.0, **BLACK_BOX)
def occlusion(query: Query, *, budget: int | None = None, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Decrease of the class score when one patch is removed (budget: none is every patch)."""
    p = query.patches
    order = spread_order(p)
    keep = torch.ones(p + 1, p, dtype=torch.bool)
    keep[torch.arange(1, p + 1), order] = False
    runs = check_budget("occlusion", budget, 2, p + 1)
    f = evaluate_subsets(query, "occlusion", keep[:runs].expand(len(query.images), -1, -1), hide, least=2)
    return to_grid(query, fill_missing(f[:, :1] - f[:, 1:], order, p))


@register_method("rise", "model", cost=1000.0, **BLACK_BOX)
def rise(query: Query, *, budget: int = 1000, seed: int = 0, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Mean output over random halves of the image that contain the patch (RISE)."""
    keep = uniform_draws(query, seed, check_budget("rise", budget), query.patches) < 0.5
    f = evaluate_subsets(query, "rise", keep, hide)
    return to_grid(query, mean_where_kept(f, keep[:, : f.shape[1]].to(f)))


@register_method("lime", "model", cost=1000.0, **BLACK_BOX)
def lime(query: Query, *, budget: int = 1000, seed: int = 0, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Coefficients of a weighted ridge regression of the output on which patches are kept (LIME)."""
    keep = uniform_draws(query, seed, check_budget("lime", budget, 2), query.patches) < 0.5
    keep[:, 0] = True
    f = evaluate_subsets(query, "lime", keep, hide, least=2).double().cpu()
    z = keep[:, : f.shape[1]].double()
    distance = 1 - z.mean(2).sqrt()
    weight = (-(distance**2) / SIGMA**2).exp()
    share = weight / weight.sum(1, keepdim=True)
    # the intercept is not penalised: center by the weights
    z = z - torch.einsum("bm,bmp->bp", share, z)[:, None]
    f = f - (share * f).sum(1, keepdim=True)
    ridge = RIDGE * torch.eye(query.patches, dtype=torch.float64)
    gram = torch.einsum("bm,bmp,bmq->bpq", weight, z, z) + ridge
    return to_grid(query, torch.linalg.solve(gram, torch.einsum("bm,bmp,bm->bp", weight, z, f)))


@register_method("kernel_shap", "model", cost=1000.0, **BLACK_BOX)
def kernel_shap(query: Query, *, budget: int = 1000, seed: int = 0, hide: str = "auto") -> Shares:
    """Shapley values by regression; they sum to the output of all patches minus that of none (KernelSHAP)."""
    p = query.patches
    pairs = -(-check_budget("kernel_shap", budget, 4) // 2)
    keep = shapley_samples(uniform_draws(query, seed, pairs, p + 1))[:, :budget]
    f = evaluate_subsets(query, "kernel_shap", keep, hide, least=4).double().cpu()
    z = keep[:, 2 : f.shape[1]].double()
    whole, none = f[:, 0], f[:, 1]
    even = (whole - none) / p  # an equal share for each patch; the deviations from it sum to zero
    rest = f[:, 2:] - none[:, None] - even[:, None] * z.sum(2)
    centered = z - z.mean(2, keepdim=True)  # so that the solution of least norm sums to zero
    values = even[:, None] + torch.einsum("bpm,bm->bp", torch.linalg.pinv(centered), rest)
    scores = to_grid(query, values)
    return Shares(scores, none.to(scores))


def shapley_samples(draws: Float[Tensor, "b pairs p1"]) -> Bool[Tensor, "b r p"]:
    """All, none, and pairs (z, 1 − z) of sizes drawn by the Shapley kernel; from a row of draws per pair."""
    keep = shapley_pairs(draws)
    keep[:, 0], keep[:, 1] = True, False
    return keep


def shapley_pairs(draws: Float[Tensor, "b pairs p1"]) -> Bool[Tensor, "b r p"]:
    """Pairs (z, 1 − z) of sizes drawn by the Shapley kernel, 1 to p − 1; from a row of draws per pair."""
    p = draws.shape[2] - 1
    sizes = torch.arange(1, p, dtype=torch.float64)
    mass = 1 / (sizes * (p - sizes))
    size = 1 + torch.searchsorted(mass.cumsum(0) / mass.sum(), draws[:, :, 0].contiguous()).clamp_max(p - 2)
    rank = draws[:, :, 1:].argsort(2).argsort(2)
    z = rank < size[:, :, None]
    return torch.stack([z, ~z], 2).flatten(1, 2)


@register_method("pami", "model", cost=251.0, **BLACK_BOX)
def pami(query: Query, *, budget: int | None = None, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Mean output of one region alone, over regions with the patch (PAMI; budget: none is every region)."""
    height, width = query.grid
    all_cells = [cell for side in sides(height, width) for cell in cells(height, width, side)]
    regions = torch.stack(all_cells).flatten(1)
    regions = regions[: check_budget("pami", budget, 1, len(regions))]
    f = evaluate_subsets(query, "pami", regions.expand(len(query.images), -1, -1), hide)
    return to_grid(query, mean_where_kept(f, regions[: f.shape[1]].to(f).expand(len(f), -1, -1)))


def sides(height: int, width: int) -> list[int]:
    """Side lengths of the cells, coarse to fine: half of the grid down to two patches."""
    return list(range(-(-max(height, width) // 2), 1, -1)) or [1]


def cells(height: int, width: int, side: int) -> Iterator[Bool[Tensor, "h w"]]:
    """The cells of a grid of squares, and of the grid shifted by half a cell both ways; cut at the border."""
    for shift in dict.fromkeys((0, side // 2)):
        for top in range(-shift, height, side):
            for left in range(-shift, width, side):
                cell = torch.zeros(height, width, dtype=torch.bool)
                cell[max(top, 0) : top + side, max(left, 0) : left + side] = True
                yield cell


@register_method(
    "hsic",
    "model",
    cost=1000.0,
    **{**BLACK_BOX, "class_specific": False},
    class_specific_if={"output": "class"},
)
def hsic(
    query: Query, *, budget: int = 1000, seed: int = 0, output: str = "distribution", hide: str = "auto"
) -> Float[Tensor, "b h w"]:
    """How much the output depends on the patch, by HSIC; never negative (output: "distribution", "class")."""
    if output not in ("distribution", "class"):
        raise UnknownNameError("output", str(output), ("distribution", "class"))
    keep = uniform_draws(query, seed, check_budget("hsic", budget, 2), query.patches) < 0.5
    read = _distribution if output == "distribution" else _class
    f = evaluate_subsets(query, "hsic", keep, hide, least=2, read=read).double().cpu()
    m = f.shape[1]
    distance = torch.cdist(f, f, compute_mode="donot_use_mm_for_euclid_dist")
    between = distance[:, ~torch.eye(m, dtype=torch.bool)]
    width = between.median(1).values.clamp_min(torch.finfo(torch.float64).tiny ** 0.5)  # its square > 0
    kernel = (-(distance**2) / (2 * width[:, None, None] ** 2)).exp()
    # H K_j H = 2 z zᵀ with z centered: the Dirac kernel of two values is 1/2 + 2 (z − 1/2)(z' − 1/2)
    z = keep[:, :m].double()
    z = z - z.mean(1, keepdim=True)
    return to_grid(query, 2 * torch.einsum("bmp,bmn,bnp->bp", z, kernel, z) / (m - 1) ** 2)


def _distribution(query: Query, logits: Float[Tensor, "b r c"]) -> Float[Tensor, "b r c"]:
    return predictions(query.vit.plan.outputs, at_least_float32(logits))


def _class(query: Query, logits: Float[Tensor, "b r c"]) -> Float[Tensor, "b r 1"]:
    return explained_values(query, logits)[..., None]
