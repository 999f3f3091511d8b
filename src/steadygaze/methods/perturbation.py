"""Black-box methods: presence vectors z ∈ {0,1}^P over the patches, f(z) the quantity that is explained with only those patches.

| name        | runs                                                        | s_j                                                      |
| occlusion   | all, and all without j (Zeiler & Fergus 2014)               | f(all) − f(all∖j)                                        |
| rise        | each patch kept with probability 1/2 (Petsiuk et al. 2018)  | Σ_m f(z^m) z^m_j / Σ_m z^m_j                             |
| lime        | all, and as rise (Ribeiro et al. 2016)                      | weighted ridge of f on z, λ = 1: its coefficient j       |
| kernel_shap | all, none, pairs (z, 1 − z) (Lundberg & Lee 2017)           | least squares with Σ_j s_j = f(all) − f(none)            |
| pami        | one cell of a grid, several grids (Shi et al. 2023)         | mean f over the cells that hold j                        |
| hsic        | as rise (Novello et al. 2022)                               | tr(K_j H L H) / (M − 1)², K_j of z_j (Dirac), L of f (RBF) |

lime's kernel is exp(−d²/σ²), d = 1 − cos(z, 1) = 1 − √(|z|/P), σ = 0.25. The Shapley kernel's mass at size s, over all sets of that
size, is ∝ 1/(s (P − s)): sizes are drawn by it, so the samples weigh alike. L's width is the median distance.

f is the class's probability (score="prob") unless another score is asked for. Hidden patches are removed (see vit.subsets), which
also is why these are quick: a run with half of the patches costs half. `budget` counts runs; every list of runs begins the same
way however long it is, so a smaller budget, or a search that was stopped, is the beginning of a longer one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steadygaze.errors import UnknownName
from steadygaze.method_registry import register_method
from steadygaze.methods.search import budget_of, measured, uniform, values

PATCHES = 196  # of the usual 14 x 14 grid, for the costs that are listed
SIGMA, RIDGE = 0.25, 1.0
BLACK_BOX: dict[str, Any] = {
    "family": "black box",
    "gradient": False,
    "class_specific": True,
    "score": "prob",
}


def _patches(ask: Any) -> int:
    return ask.grid[0] * ask.grid[1]


def on_grid(ask: Any, scores: Float[Tensor, "b p"]) -> Float[Tensor, "b h w"]:
    """On the model's grid and device, in its precision but at least float32: float16 has no room for a rare class's probability."""
    return scores.to(ask.images.device, torch.promote_types(ask.images.dtype, torch.float32)).unflatten(
        1, ask.grid
    )


def spread_order(n: int) -> list[int]:
    """0..n−1 in a fixed order that a prefix of covers evenly enough."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()


def of_those_done(found: Float[Tensor, "b r"], order: list[int], n: int) -> Float[Tensor, "b n"]:
    """found[:, i] belongs to order[i]; what was not measured gets the mean of what was."""
    scores = found.mean(1, keepdim=True).repeat(1, n)
    scores[:, order[: found.shape[1]]] = found
    return scores


def held_mean(f: Float[Tensor, "b m"], z: Float[Tensor, "b m p"]) -> Float[Tensor, "b p"]:
    """Σ_m f_m z_mj / Σ_m z_mj. A patch that no run has held yet gets the mean of the runs that held any: a zero would say "against"."""
    held, some = z.sum(1), (z > 0).any(2).to(f)
    scores = torch.einsum("bm,bmp->bp", f, z) / held.clamp_min(torch.finfo(f.dtype).tiny)
    return torch.where(held > 0, scores, ((f * some).sum(1) / some.sum(1).clamp_min(1))[:, None])


@register_method("occlusion", "model", cost=PATCHES + 1.0, **BLACK_BOX)
def occlusion(ask: Any, *, budget: int | None = None, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """How much the class loses when one patch is left out (budget: none is every patch)."""
    p = _patches(ask)
    order = spread_order(p)
    keep = torch.ones(p + 1, p, dtype=torch.bool)
    keep[torch.arange(1, p + 1), order] = False
    keep = keep[: budget_of("occlusion", budget, 2, p + 1)].expand(len(ask.images), -1, -1)
    f = measured(ask, "occlusion", keep, hide, least=2)
    return on_grid(ask, of_those_done(f[:, :1] - f[:, 1:], order, p))


@register_method("rise", "model", cost=1000.0, **BLACK_BOX)
def rise(ask: Any, *, budget: int = 1000, seed: int = 0, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Mean answer over random halves of the picture that hold the patch (RISE)."""
    keep = uniform(ask, seed, budget_of("rise", budget), _patches(ask)) < 0.5
    f = measured(ask, "rise", keep, hide)
    return on_grid(ask, held_mean(f, keep[:, : f.shape[1]].to(f)))


@register_method("lime", "model", cost=1000.0, **BLACK_BOX)
def lime(ask: Any, *, budget: int = 1000, seed: int = 0, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Coefficients of a weighted ridge regression of the answer on which patches are there (LIME)."""
    p = _patches(ask)
    keep = uniform(ask, seed, budget_of("lime", budget, 2), p) < 0.5
    keep[:, 0] = True
    f = measured(ask, "lime", keep, hide, least=2).double().cpu()
    z = keep[:, : f.shape[1]].double()
    distance = 1 - (z.mean(2)).sqrt()
    weight = (-(distance**2) / SIGMA**2).exp()
    share = weight / weight.sum(1, keepdim=True)
    z = (
        z - torch.einsum("bm,bmp->bp", share, z)[:, None]
    )  # the intercept is not penalised: centre by the weights
    f = f - (share * f).sum(1, keepdim=True)
    gram = torch.einsum("bm,bmp,bmq->bpq", weight, z, z) + RIDGE * torch.eye(p, dtype=torch.float64)
    return on_grid(ask, torch.linalg.solve(gram, torch.einsum("bm,bmp,bm->bp", weight, z, f)))


@register_method("kernel_shap", "model", cost=1000.0, **BLACK_BOX)
def kernel_shap(ask: Any, *, budget: int = 1000, seed: int = 0, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Shapley values by regression: they add up to what all patches together give (KernelSHAP)."""
    p = _patches(ask)
    keep = shapley_samples(uniform(ask, seed, -(-budget_of("kernel_shap", budget, 4) // 2), p + 1))[
        :, :budget
    ]
    f = measured(ask, "kernel_shap", keep, hide, least=4).double().cpu()
    z = keep[:, 2 : f.shape[1]].double()
    whole, none = f[:, 0], f[:, 1]
    even = (whole - none) / p  # what each patch has if all have the same; the rest adds up to zero
    rest = f[:, 2:] - none[:, None] - even[:, None] * z.sum(2)
    centred = z - z.mean(2, keepdim=True)  # so that the solution of least norm adds up to zero
    return on_grid(ask, even[:, None] + torch.einsum("bpm,bm->bp", torch.linalg.pinv(centred), rest))


def shapley_samples(draws: Float[Tensor, "b pairs p1"]) -> Bool[Tensor, "b r p"]:
    """All, none, and pairs (z, 1 − z) whose size is drawn by the Shapley kernel; of uniform draws, one row a pair."""
    p = draws.shape[2] - 1
    sizes = torch.arange(1, p, dtype=torch.float64)
    mass = 1 / (sizes * (p - sizes))
    size = 1 + torch.searchsorted(mass.cumsum(0) / mass.sum(), draws[:, :, 0].contiguous()).clamp_max(p - 2)
    rank = draws[:, :, 1:].argsort(2).argsort(2)
    z = rank < size[:, :, None]
    z[:, 0] = True
    return torch.stack([z, ~z], 2).flatten(1, 2)


@register_method("pami", "model", cost=251.0, **BLACK_BOX)
def pami(ask: Any, *, budget: int | None = None, hide: str = "auto") -> Float[Tensor, "b h w"]:
    """Mean answer to one region alone, over the regions that hold the patch (PAMI; budget: none is every region)."""
    height, width = ask.grid
    regions = torch.stack(
        [cell for side in sides(height, width) for cell in cells(height, width, side)]
    ).flatten(1)
    regions = regions[: budget_of("pami", budget, 1, len(regions))]
    f = measured(ask, "pami", regions.expand(len(ask.images), -1, -1), hide)
    return on_grid(ask, held_mean(f, regions[: f.shape[1]].to(f).expand(len(f), -1, -1)))


def sides(height: int, width: int) -> list[int]:
    """Sides of the cells, coarse to fine: half of the grid down to two patches."""
    return list(range(-(-max(height, width) // 2), 1, -1)) or [1]


def cells(height: int, width: int, side: int) -> Iterator[Bool[Tensor, "h w"]]:
    """The cells of a grid of squares, and of the same grid moved by half a cell both ways; cut at the border."""
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
    ask: Any, *, budget: int = 1000, seed: int = 0, output: str = "distribution", hide: str = "auto"
) -> Float[Tensor, "b h w"]:
    """How much the answer depends on the patch being there, by HSIC; never negative (output: "distribution", or the "class")."""
    if output not in ("distribution", "class"):
        raise UnknownName("output", str(output), ("distribution", "class"))
    keep = uniform(ask, seed, budget_of("hsic", budget, 2), _patches(ask)) < 0.5
    f = (
        measured(ask, "hsic", keep, hide, least=2, of=_distribution if output == "distribution" else _class)
        .double()
        .cpu()
    )
    m = f.shape[1]
    distance = torch.cdist(f, f, compute_mode="donot_use_mm_for_euclid_dist")
    apart = distance[:, ~torch.eye(m, dtype=torch.bool)]
    width = apart.median(1).values.clamp_min(torch.finfo(torch.float64).tiny)
    kernel = (-(distance**2) / (2 * width[:, None, None] ** 2)).exp()
    z = keep[:, :m].double()
    z = z - z.mean(
        1, keepdim=True
    )  # H K_j H = 2 z zᵀ with z centred: the Dirac kernel of two values is 1/2 + 2 (z − 1/2)(z' − 1/2)
    return on_grid(ask, 2 * torch.einsum("bmp,bmn,bnp->bp", z, kernel, z) / (m - 1) ** 2)


def _distribution(ask: Any, logits: Float[Tensor, "b r c"]) -> Float[Tensor, "b r c"]:
    return logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def _class(ask: Any, logits: Float[Tensor, "b r c"]) -> Float[Tensor, "b r 1"]:
    return values(ask, logits)[..., None]
