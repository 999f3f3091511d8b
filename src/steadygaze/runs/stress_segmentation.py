"""Segmentation in a stress run: the plan, the counts that a row carries, and the numbers of the card that are made of them.

A row of `miou` is one picture under one condition: its value is the picture's own mIoU, its detail [class, right, said, true, ...], pixels
of each class that is in the map or in the answer. The card adds these up over pictures before it divides (see `data.confusion`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.data.confusion import iou_of
from steadygaze.robustness.segmentation import CITYSCAPES_C, NOISE, mean_miou, retention, scores_of
from steadygaze.runs.statistics import draws
from steadygaze.runs.stress_numbers import Key
from steadygaze.runs.stress_suite import Condition, Options, Plan
from steadygaze.runs.wording import counted
from steadygaze.vit.view import evaluation_mode

METRIC = "miou"
Score = tuple[Key, np.ndarray, int, str]


def segmentation_plan(options: Options, classes: int, seed: int, batch: int) -> Plan:
    """Clean, and every corruption at every severity."""
    found = [Condition("clean", rows=(("clean", METRIC),))]
    found += [
        Condition("corruption", c, s, ((f"{c}/{s}", METRIC),))
        for c in options.corruptions
        for s in options.severities
    ]
    return Plan(tuple(found), (), seed, batch, options, (), (METRIC,), classes)


def segment_outputs(model: nn.Module, size: tuple[int, int]) -> int:
    """How many classes a segmenter tells apart."""
    parameter = next(iter(model.parameters()), torch.zeros(0))
    with torch.no_grad(), evaluation_mode(model):
        return scores_of(
            model(torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype))
        ).shape[1]


def packed(found: Int[Tensor, "3 c"]) -> np.ndarray:
    """[class, right, said, true, ...] of the classes that are there."""
    there = found[1:].sum(0).nonzero()[:, 0]
    return torch.stack([there, *found[:, there]], 1).flatten().cpu().numpy()


def unpacked(
    details: Sequence[Sequence[int]], places: Iterable[int], pictures: int, classes: int
) -> Float[np.ndarray, "n 3 c"]:
    """The counts of every picture at its place; nothing where there is none."""
    out = np.zeros((pictures, 3, classes))
    for place, detail in zip(places, details, strict=True):
        each = np.asarray(detail, dtype=np.int64).reshape(-1, 4)
        out[place, :, each[:, 0]] = each[:, 1:]
    return out


def resampled(counts: Float[np.ndarray, "n 3 c"], repeats: int, seed: int) -> Float[np.ndarray, "r 3 c"]:
    """The summed counts of the data set, and of every resampled one, with the same draws as `bootstrap`."""
    flat = counts.reshape(len(counts), -1)
    sums = [flat.sum(0, keepdims=True), *(taken @ flat for taken in draws(len(flat), repeats, seed))]
    return np.concatenate(sums).reshape(-1, *counts.shape[1:])


def set_numbers(sums: Float[np.ndarray, "r 3 c"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mIoU (r,), share of right pixels (r,) and IoU by class (r, c), NaN where there is none, of summed counts."""
    by_class = iou_of(*np.moveaxis(sums, 1, 0))
    there = ~np.isnan(by_class)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (
            np.where(there, by_class, 0).sum(1) / there.sum(1),
            sums[:, 0].sum(1) / sums[:, 2].sum(1),
            by_class,
        )


def segmentation_scores(
    found: dict[str, dict[int, np.ndarray]], clean: np.ndarray | None, images: int
) -> Iterator[Score]:
    """Of mIoU by corruption and severity: mean of each corruption, mean over them by both protocols, and what is kept of the clean."""
    for name, levels in found.items():
        yield (
            (name, METRIC),
            np.mean(list(levels.values()), axis=0),
            images,
            f"severities {', '.join(map(str, levels))}",
        )
    protocols = {
        "": f"{counted(len(found), 'corruption')}, severities {_levels(found.values())}; made in memory; {images} pictures"
    }
    some = {
        n: {s: v for s, v in levels.items() if n not in NOISE or s <= 3}
        for n, levels in found.items()
        if n in CITYSCAPES_C
    }
    some = {name: levels for name, levels in some.items() if levels}
    if some:
        protocols["_cityscapes_c"] = (
            f"{len(some)} of the 16 corruptions of Cityscapes-C, severities {_levels(some.values())}, of noise up to 3; "
            f"made in memory; {images} pictures"
        )
    for tail, note in protocols.items():
        mean = mean_miou(found, "cityscapes-c" if tail else "all")
        yield ("corruptions", f"mean_{METRIC}{tail}"), mean, images, note
        if clean is not None:
            yield (
                ("corruptions", f"retention{tail}"),
                retention(mean, clean),
                images,
                f"mean mIoU / clean mIoU; {note}",
            )


def _levels(found: Iterable[dict[int, np.ndarray]]) -> str:
    return ", ".join(map(str, sorted({s for levels in found for s in levels})))
