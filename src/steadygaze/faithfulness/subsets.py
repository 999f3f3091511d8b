"""Does the sum of scores tell what a random set of patches is worth? Infidelity and two correlations.

Random sets S of patches are hidden, the same ones for all maps (docs/equations.md#subset-metrics). With
a_S = Σ_{j∈S} map_j and d_S = p_whole − p without S, p the probability of the target (a value as it is):

    sensitivity_n              mean over sizes n of the Pearson correlation of a_S and d_S over sets of n
                               patches
    faithfulness_correlation   the same for one size, over more sets
    infidelity                 mean of (β a_S − d_S)² over the sets of all sizes,  β = Σ a_S d_S / Σ a_S²

| symbol | variable                                                                             |
| n      | `SHARES` of the patches, `SUBSETS` sets each; `SHARE` and `MORE_SUBSETS` for one size |
| S      | `hidden`; row s of image b is true for the patches of one set                        |
| a, d   | `attributed`, `lost`                                                                 |
| β      | `scale`, the factor that makes the error smallest; `infidelity_unscaled` has β = 1    |

Sensitivity-n is of Ancona et al. 2018, faithfulness correlation of Bhatt et al. 2020, infidelity of Yeh et
al. 2019, where S is what a perturbation I takes away: Iᵀ map = a_S for scores that count a patch as a whole.
β is that of the authors' code and of captum (normalize=True): maps of most methods are in no unit. It may be
negative, so that a map and its negative have the same infidelity.

Forward passes: those of the sets, whatever the number of maps. The sets of an image depend on the seed and
its name alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.faithfulness.hiding import hiding_note, kept_logits, paint_of
from steadygaze.faithfulness.inputs import Batch, CachedForward, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.seeding import image_seed

SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the patches, hidden together
SUBSETS = 20  # of each size
SHARE, MORE_SUBSETS = 2, 50  # faithfulness_correlation: index in SHARES, and number of sets; 20 are shared


def random_subsets(
    batch: Batch, patches: int, sizes: Sequence[int], counts: Sequence[int], seed: int = 0
) -> list[Bool[Tensor, "b s p"]]:
    """Random sets of patches, `counts[i]` of `sizes[i]` patches, for each image of the batch.

    The first sets of a size are the same whatever its count is.
    """
    hidden = [torch.zeros(len(batch.images), count, patches, dtype=torch.bool) for count in counts]
    for b in range(len(batch.images)):
        for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            generator = torch.Generator().manual_seed(image_seed(seed, f"subsets:{size}:{batch.name(b)}"))
            order = torch.rand(count, patches, generator=generator, dtype=torch.float64).argsort(1)
            hidden[index][b].scatter_(1, order[:, :size], True)
    return [part.to(batch.images.device) for part in hidden]


def lost_with(
    whole: CachedForward,
    target: Int[Tensor, " b"],
    hidden: Bool[Tensor, "b s p"],
    paint: Float[Tensor, "b c h w"] | None = None,
) -> Float[Tensor, "b s"]:
    """How much of the target's probability, or value, is lost with each set of patches."""
    b, s, _ = hidden.shape
    image = torch.arange(b, device=hidden.device).repeat_interleave(s)
    logits = kept_logits(whole, ~hidden.flatten(0, 1), image, paint)
    left = whole.predictions(logits).gather(1, target[image][:, None]).view(b, s)
    return whole.probabilities.gather(1, target[:, None]) - left


def attributed_to(maps: Float[Tensor, "m b gh gw"], hidden: Bool[Tensor, "b s p"]) -> Float[Tensor, "m b s"]:
    """The sum of a map's scores over each set of patches, in float64."""
    return torch.einsum("mbp,bsp->mbs", maps.flatten(2).double(), hidden.double())


def pearson(x: Float[Tensor, "m b s"], y: Float[Tensor, "b s"]) -> Float[Tensor, "m b"]:
    """Pearson's correlation over the last axis, −1..1; NaN where either is constant."""
    x, y = (t - t.mean(-1, keepdim=True) for t in (x.double(), y.double()))
    constant = (x.abs().amax(-1) <= 1e-12) | (y.abs().amax(-1) <= 1e-12)
    correlation = (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return correlation.clamp(-1, 1).masked_fill(constant, float("nan"))


def infidelity(
    attributed: Float[Tensor, "m b s"], lost: Float[Tensor, "b s"], *, scaled: bool = True
) -> Float[Tensor, "m b"]:
    """Mean squared error of the scores of sets as predictions of what is lost with them."""
    if scaled:
        square = attributed.square().sum(-1)
        scale = (attributed * lost).sum(-1) / square.masked_fill(square == 0, 1)
        attributed = scale[..., None] * attributed
    return (attributed - lost).square().mean(-1)


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The metrics `names` from one set of forward passes."""
    patches = given.maps.shape[2] * given.maps.shape[3]
    sizes = [max(1, int(share * patches)) for share in SHARES]
    all_sizes = any(name != "faithfulness_correlation" for name in names)
    counts = [SUBSETS if all_sizes else 0 for _ in sizes]
    if "faithfulness_correlation" in names:
        counts[SHARE] = MORE_SUBSETS
    hidden = random_subsets(given.batch, patches, sizes, counts, given.seed)
    lost = lost_with(given.forward, given.target, torch.cat(hidden, 1), paint_of(given)).double()
    attributed = attributed_to(given.maps, torch.cat(hidden, 1))
    by_size = list(zip(attributed.split(counts, 2), lost.split(counts, 1), strict=True))
    values = {}
    if "faithfulness_correlation" in names:
        values["faithfulness_correlation"] = Values(pearson(*by_size[SHARE]))
    if all_sizes:
        by_size = [(a[..., :SUBSETS], d[:, :SUBSETS]) for a, d in by_size]
        correlations = torch.stack([pearson(a, d) for a, d in by_size], -1)
        attributed, lost = (torch.cat(parts, -1) for parts in zip(*by_size, strict=True))
        values["sensitivity_n"] = Values(correlations.nanmean(-1), correlations)
        values["infidelity"] = Values(infidelity(attributed, lost))
        values["infidelity_unscaled"] = Values(infidelity(attributed, lost, scaled=False))
    return {name: replace(values[name], note=hiding_note(given)) for name in names}


# -- registration


def _correlation(name: str, summary: str) -> Metric:
    about = "correlation of a set's scores with the probability lost without it"
    return Metric(
        name,
        "",
        "higher",
        -1,
        1,
        summary=f"{about}; {summary}",
        family="subsets",
        compute=compute,
        hides_patches=True,
    )


def _infidelity(name: str, summary: str) -> Metric:
    return Metric(
        name,
        "",
        "lower",
        0,
        digits=4,
        summary=summary,
        family="subsets",
        compute=compute,
        hides_patches=True,
        variant=name != "infidelity",
    )


add_metrics(
    [
        _correlation(
            "sensitivity_n",
            "random sets of 5, 10, 20, 40 and 80 % of the patches, 20 each, the same for all methods",
        ),
        _correlation("faithfulness_correlation", "50 random sets of 20 % of the patches"),
        _infidelity(
            "infidelity",
            "squared error of a set's scores, times the best factor, as a prediction of the probability lost "
            "without the set; the sets of sensitivity_n",
        ),
        _infidelity("infidelity_unscaled", "infidelity of the scores as they are, without a factor"),
    ]
)
