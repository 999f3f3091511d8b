"""Localization metrics: does the map lie on the object? And the rank statistics that metrics share.

Formulas: docs/equations.md#segmentation-ap, docs/equations.md#segmentation-chefer and
docs/equations.md#pointing-game.

Masks hold 255 for object and 0 for background. Pixels of any other value are unlabeled (border) and left
out.

    average_precision   AP of the object's pixels under the map upsampled with nearest neighbors (SkipPLUS)
    with m the min-max rescaled, bilinearly upsampled map; a constant map gives m = 0 (Chefer et al.):
    pixel_accuracy      share of pixels where [m > mean m] is correct; the data set's value is Σ correct / Σ
                        labeled
    miou                mean of IoU(object) and IoU(background); the data set's value has summed counts
    map_chefer          AP over the 2·n values (1 − m, m) against (background, object)
    with s the bilinearly upsampled map:
    pointing_game       100 if the maximum of s over the labeled pixels lies in the object, else 0
    mask_share          Σ_object max(s, 0) / Σ_labeled max(s, 0)
    on mosaics, whose masks are the cells of the explained class (docs/equations.md#mosaics), with a_j the
    share of patch j that is object and m the map itself:
    focus               Σ_j a_j max(m_j, 0) / Σ_j max(m_j, 0): two of four cells (Arias-Duart et al. 2022)
    grid_pointing       the same: one of n x n cells (Böhle et al. 2021)

All in percent, 0..100, higher is better. NaN where a metric is undefined for an image: no object, no labeled
pixel, or no positive relevance.

Rank statistics with ties (average ranks, Spearman's ρ, AUROC, average precision) work along the last axis and
agree with scipy and scikit-learn (docs/equations.md#rank-statistics).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from steadygaze.faithfulness.inputs import BACKGROUND, OBJECT, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.methods.aggregate import min_max
from steadygaze.quantity import Combine, mean, pooled


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

    Examples:
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])).item()
        -1.0
    """
    a, b = (r - r.mean(-1, keepdim=True) for r in (ranks(x), ranks(y)))
    return ((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()).clamp(-1, 1)


def auroc(scores: Float[Tensor, "*b n"], positive: Bool[Tensor, " n"]) -> Float[Tensor, "*b"]:
    """Probability that a positive scores higher than a negative, ties count half; NaN without both kinds.

    Examples:
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

    Examples:
        >>> labels = torch.tensor([False, False, True, True])
        >>> average_precision(torch.tensor([0.1, 0.4, 0.3, 0.8]), labels).item()
        0.8333333333333333
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    hit = positive.expand(scores.shape).gather(-1, order).double()
    _, last = _tied_runs(ordered)
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    precision = (hit.cumsum(-1) / count).gather(-1, last)
    return (hit * precision).sum(-1) / hit.sum(-1)


NAMES = ("average_precision", "pixel_accuracy", "miou", "map_chefer", "pointing_game", "mask_share")
# lengths of the counts: [correct, labeled] and [object ∩, object ∪, background ∩, background ∪]
COUNTS = {"pixel_accuracy": 2, "miou": 4}


def localization(
    maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"], names: Sequence[str] = NAMES
) -> dict[str, Values]:
    """The localization metrics `names` of every map, in percent."""
    requested = [n for n in NAMES if n in names]
    m, b = maps.shape[:2]
    values = {n: maps.new_empty(m, b, dtype=torch.float64) for n in requested}
    details = {n: maps.new_empty(m, b, COUNTS[n], dtype=torch.float64) for n in requested if n in COUNTS}
    for image in range(b):
        for method in range(m):  # one map at a time: the pixels of all maps would need too much memory
            scores, counts = _localize(maps[method, image], masks[image], requested)
            for n in requested:
                values[n][method, image] = scores[n]
            for n in details:
                details[n][method, image] = counts[n]
    return {n: Values(values[n], details.get(n)) for n in requested}


def upsample(
    maps: Float[Tensor, "*b gh gw"], size: tuple[int, int], mode: str = "bilinear"
) -> Float[Tensor, "*b h w"]:
    """Maps at pixel resolution; mode: "bilinear" (corners not aligned) or "nearest"."""
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    align_corners = False if mode == "bilinear" else None
    large = F.interpolate(flat, size=size, mode=mode, align_corners=align_corners)
    return large.reshape(*maps.shape[:-2], *size)


def _localize(
    scores_map: Float[Tensor, "gh gw"], mask: UInt8[Tensor, "h w"], names: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(score, counts) by metric for one map of one image."""
    size = (mask.shape[0], mask.shape[1])
    labeled = ((mask == OBJECT) | (mask == BACKGROUND)).flatten()
    inside = (mask == OBJECT).flatten()[labeled]
    smooth = upsample(scores_map, size).flatten()
    scores: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    if "average_precision" in names:
        nearest = upsample(scores_map, size, "nearest").flatten()
        scores["average_precision"] = 100 * average_precision(nearest[labeled], inside)
    if {"pixel_accuracy", "miou", "map_chefer"} & set(names):
        scaled = min_max(smooth, (-1,))
        predicted = (scaled > scaled.mean())[labeled]
        counts["pixel_accuracy"] = torch.stack([(predicted == inside).sum(), labeled.sum()]).double()
        overlaps = (*_overlap(predicted, inside), *_overlap(~predicted, ~inside))
        counts["miou"] = torch.stack(overlaps).double()
        correct, total = counts["pixel_accuracy"]
        scores["pixel_accuracy"] = 100 * correct / total
        iou = counts["miou"][0::2] / counts["miou"][1::2]  # NaN if neither map nor mask has the kind
        scores["miou"] = 100 * iou.nanmean()
    if "map_chefer" in names:
        both = torch.cat([1 - scaled[labeled], scaled[labeled]])
        scores["map_chefer"] = 100 * average_precision(both, torch.cat([~inside, inside]))
    relevance = smooth[labeled].double()
    has_object = bool(inside.any())
    nan = relevance.new_tensor(float("nan"))
    if "pointing_game" in names:
        hit = inside[_first_maximum(relevance)] if has_object else nan
        scores["pointing_game"] = 100 * hit.double()
    if "mask_share" in names:
        positive = relevance.clamp_min(0)
        scores["mask_share"] = 100 * positive[inside].sum() / positive.sum() if has_object else nan
    return scores, counts


def positive_share(maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"]) -> Float[Tensor, "m b"]:
    """Percent of the positive relevance on object, patch by patch; NaN without positive relevance.

    Examples:
        >>> mask = torch.zeros(1, 2, 2, dtype=torch.uint8)
        >>> mask[:, 0] = 255
        >>> positive_share(torch.tensor([[[[3.0, -5.0], [0.0, 1.0]]]]), mask).item()
        75.0
    """
    grid = (maps.shape[-2], maps.shape[-1])
    inside = F.adaptive_avg_pool2d((masks == OBJECT)[:, None].double(), grid)[:, 0]
    positive = maps.double().clamp_min(0)
    return 100 * (positive * inside).sum((-2, -1)) / positive.sum((-2, -1))


def _overlap(a: Bool[Tensor, " n"], b: Bool[Tensor, " n"]) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
    """(intersection, union)."""
    return (a & b).sum(), (a | b).sum()


def _first_maximum(x: Float[Tensor, " n"]) -> Int[Tensor, ""]:
    """Index of the first maximum; torch's argmax does not specify the order of equal values."""
    return (x == x.max()).nonzero()[0, 0]


# -- registration


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The localization metrics that `names` lists."""
    return localization(given.maps, given.masks, names)


def compute_shares(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """Positive relevance in the cells of a mosaic that show the explained class."""
    return {name: Values(positive_share(given.maps, given.masks)) for name in names}


def _entry(name: str, summary: str, combine: Combine = mean, shares: bool = False) -> Metric:
    return Metric(
        name,
        "%",
        "higher",
        0,
        100,
        summary=summary,
        combine=combine,
        family="localization",
        by_map=True,
        compute=compute_shares if shares else compute,
        needs_masks=True,
        uses_model=False,
    )


add_metrics(
    [
        _entry("average_precision", "average precision of the object's pixels, map upsampled by nearest"),
        _entry("pixel_accuracy", "pixels on the correct side of the map's mean, summed over images", pooled),
        _entry("miou", "mean IoU of object and background at the map's mean, summed over images", pooled),
        _entry("map_chefer", "average precision over both channels, map and 1 − map"),
        _entry("pointing_game", "the map's maximum lies in the object: 100 or 0"),
        _entry("mask_share", "share of the positive relevance that lies in the object"),
        _entry("focus", "positive relevance on the class's two of four mosaic cells; chance 50", shares=True),
        _entry("grid_pointing", "positive relevance on the class's cell of a mosaic; chance 25", shares=True),
    ]
)
