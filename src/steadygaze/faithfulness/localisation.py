"""Localisation: does the map lie on the object? Masks: 255 object, 0 background; anything else is border and left out.

    average_precision   AP of the object's pixels under the map upsampled by nearest (SkipPLUS)
    with m = min-max of the map upsampled bilinearly, over all pixels; a constant map gives m = 0 (Chefer et al.):
    pixel_accuracy      [m > mean m] is right; the data set's number is Σ right / Σ labelled
    miou                mean of IoU(object), IoU(background); the data set's number has summed intersections and unions
    map_chefer          AP over the 2·n values (1 − m, m) against (background, object)
    with s the map upsampled bilinearly:
    pointing_game       argmax of s over the labelled pixels (the first, in raster order) lies in the object: 100 or 0
    mask_share          Σ_object max(s, 0) / Σ_labelled max(s, 0)

All in percent, 0..100, higher is better. NaN: undefined for this image (no object, no labelled pixel, no positive relevance).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from steadygaze.faithfulness.inputs import BACKGROUND, OBJECT, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics, mean, pooled
from steadygaze.faithfulness.ranks import average_precision
from steadygaze.quantity import Combine

NAMES = ("average_precision", "pixel_accuracy", "miou", "map_chefer", "pointing_game", "mask_share")
COUNTS = {
    "pixel_accuracy": 2,  # correct, labelled
    "miou": 4,  # intersection and union of the object, intersection and union of the background
}


def localisation(
    maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"], names: Sequence[str] = NAMES
) -> dict[str, Values]:
    """The localisation metrics of every map, in percent."""
    wanted = [n for n in NAMES if n in names]
    m, b = maps.shape[:2]
    value = {n: maps.new_empty(m, b, dtype=torch.float64) for n in wanted}
    detail = {n: maps.new_empty(m, b, COUNTS[n], dtype=torch.float64) for n in wanted if n in COUNTS}
    for image in range(b):
        for method in range(m):  # one by one: the pixels of many maps would fill the memory
            values, counts = _one(maps[method, image], masks[image], wanted)
            for n in wanted:
                value[n][method, image] = values[n]
            for n in detail:
                detail[n][method, image] = counts[n]
    return {n: Values(value[n], detail.get(n)) for n in wanted}


def upsample(
    maps: Float[Tensor, "*b gh gw"], size: tuple[int, int], mode: str = "bilinear"
) -> Float[Tensor, "*b h w"]:
    """Maps in pixels: "bilinear" (corners not aligned) or "nearest"."""
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    large = F.interpolate(flat, size=size, mode=mode, align_corners=False if mode == "bilinear" else None)
    return large.reshape(*maps.shape[:-2], *size)


def _one(
    image: Float[Tensor, "gh gw"], mask: UInt8[Tensor, "h w"], names: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    size = (mask.shape[0], mask.shape[1])
    labelled = ((mask == OBJECT) | (mask == BACKGROUND)).flatten()
    inside = (mask == OBJECT).flatten()[labelled]
    smooth = upsample(image, size).flatten()
    values: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    if "average_precision" in names:
        values["average_precision"] = 100 * average_precision(
            upsample(image, size, "nearest").flatten()[labelled], inside
        )
    if {"pixel_accuracy", "miou", "map_chefer"} & set(names):
        scaled = min_max(smooth)
        chosen = (scaled > scaled.mean())[labelled]
        counts["pixel_accuracy"] = torch.stack([(chosen == inside).sum(), labelled.sum()]).double()
        counts["miou"] = torch.stack([*_overlap(chosen, inside), *_overlap(~chosen, ~inside)]).double()
        correct, of = counts["pixel_accuracy"]
        values["pixel_accuracy"] = 100 * correct / of
        iou = counts["miou"][0::2] / counts["miou"][1::2]  # NaN for a kind that neither map nor mask has
        values["miou"] = 100 * iou.nanmean()
    if "map_chefer" in names:
        both = torch.cat([1 - scaled[labelled], scaled[labelled]])
        values["map_chefer"] = 100 * average_precision(both, torch.cat([~inside, inside]))
    spots = smooth[labelled].double()
    nan = spots.new_tensor(float("nan"))
    if "pointing_game" in names:
        known = bool(inside.any())
        values["pointing_game"] = 100.0 * inside[_first_maximum(spots)].double() if known else nan
    if "mask_share" in names:
        positive = spots.clamp_min(0)
        values["mask_share"] = 100 * positive[inside].sum() / positive.sum() if bool(inside.any()) else nan
    return values, counts


def min_max(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """(x − min) / (max − min); zeros for a constant."""
    low, high = x.min(), x.max()
    return (x - low) / (high - low) if bool(high > low) else torch.zeros_like(x)


def _overlap(a: Bool[Tensor, " n"], b: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    return (a & b).sum(), (a | b).sum()


def _first_maximum(x: Float[Tensor, " n"]) -> Tensor:
    """Index of the first maximum; torch's argmax promises no order among equals."""
    return (x == x.max()).nonzero()[0, 0]


# -- registration ------------------------------------------------------------------------------------------------------


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The localisation metrics that `names` lists."""
    return localisation(given.maps, given.masks, names)


def _entry(name: str, summary: str, combine: Combine = mean) -> Metric:
    return Metric(
        name,
        "%",
        "higher",
        0,
        100,
        summary=summary,
        combine=combine,
        family="localisation",
        compute=compute,
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
    ]
)
