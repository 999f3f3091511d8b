"""Against known truth: which patches are relevant is known (tasks of `ground_truth.py`, or any mask that is the truth).

A patch is truly relevant if most of its labelled pixels are 255, and left out if it has none.

    truth_auroc       P(a relevant patch scores higher than another one), ties count half; 0..1, 0.5 is chance
    truth_precision   100 · relevant ones among the top n / n, with n their number; ties in raster order; 0..100

Higher is better. NaN where every patch, or none, is relevant.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from steadygaze.faithfulness.inputs import BACKGROUND, OBJECT, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.faithfulness.ranks import auroc


def truth(maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"]) -> dict[str, Values]:
    """`truth_auroc` and `truth_precision` of every map."""
    grid = (maps.shape[-2], maps.shape[-1])
    relevant, known = patches(masks, grid)
    areas, precisions = [], []
    for image in range(maps.shape[1]):
        there = known[image]
        scores, yes = maps[:, image].flatten(1)[:, there], relevant[image][there]
        areas.append(auroc(scores, yes))
        n = int(yes.sum())
        top = scores.argsort(dim=1, descending=True, stable=True)[:, :n]
        defined = 0 < n < len(yes)
        precisions.append(
            100 * yes[top].double().mean(1) if defined else torch.full_like(areas[-1], float("nan"))
        )
    return {
        "truth_auroc": Values(torch.stack(areas, 1)),
        "truth_precision": Values(torch.stack(precisions, 1)),
    }


def patches(
    masks: UInt8[Tensor, "b h w"], grid: tuple[int, int]
) -> tuple[Bool[Tensor, "b p"], Bool[Tensor, "b p"]]:
    """(truly relevant, has a labelled pixel) for each patch."""
    yes = F.adaptive_avg_pool2d((masks == OBJECT)[:, None].double(), grid).flatten(1)
    no = F.adaptive_avg_pool2d((masks == BACKGROUND)[:, None].double(), grid).flatten(1)
    return yes > no, (yes + no) > 0


# -- registration ------------------------------------------------------------------------------------------------------


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """Both metrics."""
    return truth(given.maps, given.masks)


def _entry(name: str, unit: str, high: float, summary: str) -> Metric:
    return Metric(
        name,
        unit,
        "higher",
        0,
        high,
        summary=summary,
        family="truth",
        compute=compute,
        needs_masks=True,
        uses_model=False,
    )


add_metrics(
    [
        _entry("truth_auroc", "", 1, "area under the ROC curve of the truly relevant patches"),
        _entry("truth_precision", "%", 100, "truly relevant ones among the top n patches, n their number"),
    ]
)
