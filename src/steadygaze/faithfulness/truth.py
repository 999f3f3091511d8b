"""Metrics against known relevance (docs/equations.md#known-truth).

A patch is relevant if most of its labelled pixels are object (255). Patches without labelled pixels are
left out.

    truth_auroc       P(a relevant patch scores higher than another one), ties count half; 0..1, chance
                      level 0.5
    truth_precision   100 · |relevant ∩ top n| / n, n the number of relevant patches; ties in raster order;
                      0..100

Higher is better. NaN where all patches are relevant, or none.
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
    relevant_by_image, labelled = relevant_patches(masks, grid)
    areas, precisions = [], []
    for image in range(maps.shape[1]):
        scores = maps[:, image].flatten(1)[:, labelled[image]]
        relevant = relevant_by_image[image][labelled[image]]
        areas.append(auroc(scores, relevant))
        n = int(relevant.sum())
        if 0 < n < len(relevant):
            top = scores.argsort(dim=1, descending=True, stable=True)[:, :n]
            precisions.append(100 * relevant[top].double().mean(1))
        else:
            precisions.append(torch.full_like(areas[-1], float("nan")))
    return {
        "truth_auroc": Values(torch.stack(areas, 1)),
        "truth_precision": Values(torch.stack(precisions, 1)),
    }


def relevant_patches(
    masks: UInt8[Tensor, "b h w"], grid: tuple[int, int]
) -> tuple[Bool[Tensor, "b p"], Bool[Tensor, "b p"]]:
    """(is relevant, has a labelled pixel) for each patch."""
    object_share = F.adaptive_avg_pool2d((masks == OBJECT)[:, None].double(), grid).flatten(1)
    background_share = F.adaptive_avg_pool2d((masks == BACKGROUND)[:, None].double(), grid).flatten(1)
    return object_share > background_share, (object_share + background_share) > 0


# -- registration
# ------------------------------------------------------------------------------------------------------


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
        by_map=True,
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
