"""Metrics of the size of scores, not only of their order: SaCo and completeness.

SaCo (docs/equations.md#saco) splits the patches by rank into K groups of equal size, G_1 the highest. s_i is
the mean score of group i, d_i the probability of the target that is lost when group i alone is removed:

    saco = Σ_{i<j} ±(s_i − s_j) / Σ_{i<j} |s_i − s_j|,   + where d_i ≥ d_j, − otherwise;   K = 10

It is 1 where groups with higher scores always matter more, −1 where they always matter less. It is invariant
to positive factors and to constants added to a map; NaN for a constant map.

completeness (docs/equations.md#completeness) is the error |Σ_j map_j + u − T|: T is the quantity that the map
explains (the logit by default), u what the method gives to no patch (prefix tokens, biases, its baseline).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.faithfulness.hiding import hiding_note, kept_logits, paint_of
from steadygaze.faithfulness.inputs import CachedForward, MetricInput, at_least_float32
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.vit.removal import ranking

GROUPS = 10  # K


def saco(
    whole: CachedForward,
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    groups: int = GROUPS,
    paint: Float[Tensor, "b c h w"] | None = None,
) -> Values:
    """SaCo of every map; `detail` is the probability lost with each group, in percent, the highest first.

    paint: pixels that replace those of a group; None: its patches are removed.
    """
    scores, order = maps.flatten(2), ranking(maps)
    m, b, p = scores.shape
    parts = order.tensor_split(min(groups, p), dim=2)  # sizes differ by one at most
    keep = torch.ones(m, b, len(parts), p, dtype=torch.bool, device=maps.device)
    for index, part in enumerate(parts):
        keep[:, :, index].scatter_(2, part, False)
    image = torch.arange(b, device=maps.device)[None, :, None].expand(keep.shape[:3]).flatten()
    logits = kept_logits(whole, keep.flatten(0, 2), image, paint)
    left = whole.predictions(logits).gather(1, target[image][:, None]).view(keep.shape[:3])
    lost = whole.probabilities.gather(1, target[:, None])[None] - left  # d
    mean = torch.stack([scores.gather(2, part).mean(2) for part in parts], 2)  # s
    first, second = torch.triu_indices(len(parts), len(parts), 1, device=maps.device)
    difference = (mean[..., first] - mean[..., second]).double()
    agrees = torch.where(lost[..., first] >= lost[..., second], 1.0, -1.0)
    total = difference.abs().sum(2)
    coefficient = (difference * agrees).sum(2) / total  # 0 / 0 = NaN: a constant map
    return Values(coefficient.clamp(-1, 1), 100 * lost)


def completeness(
    maps: Float[Tensor, "m b gh gw"], unattributed: Float[Tensor, "m b"], explained: Float[Tensor, "m b"]
) -> Float[Tensor, "m b"]:
    """|Σ map + unattributed − explained|."""
    return (maps.flatten(2).double().sum(2) + unattributed.double() - explained.double()).abs()


# -- registration
# ------------------------------------------------------------------------------------------------------


def _saco(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    values = saco(given.forward, given.maps, given.target, paint=paint_of(given))
    return {"saco": replace(values, note=hiding_note(given))}


def _completeness(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    unattributed = given.maps.new_zeros(given.maps.shape[:2])
    if given.unattributed is not None:
        unattributed = given.unattributed.to(given.maps)
    explained = given.explained
    if explained is None:
        logit = at_least_float32(given.forward.logits).gather(1, given.target[:, None])[:, 0]
        explained = logit.expand(given.maps.shape[:2])
    return {"completeness": Values(completeness(given.maps, unattributed, explained))}


add_metrics(
    [
        Metric(
            "saco",
            "",
            "higher",
            -1,
            1,
            label="SaCo",
            summary="whether removing patches with higher scores loses more probability, over pairs of "
            "10 groups of patches, weighted by the difference of their scores",
            family="magnitude",
            by_map=True,
            compute=_saco,
            hides_patches=True,
            outputs=("classes", "labels"),
        ),
        Metric(
            "completeness",
            "",
            "lower",
            0,
            label="completeness error",
            summary="|sum of the map + what the method gives to no patch − the explained quantity|, in the "
            "unit of that quantity",
            family="magnitude",
            by_map=True,
            compute=_completeness,
        ),
    ]
)
