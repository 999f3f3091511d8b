"""Numbers of a stress run with their 95 % intervals, how people read them, and which direction is better."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steadygaze.robustness.calibration import BINS
from steadygaze.runs.statistics import draws, interval

Key = tuple[str, str]  # setting, metric
PERCENT = ("top1", "top5", "confidence", "ece", "error", "mean_error", "mean_error_all", "flips", "drop_right", "drop_probability",
           "miou", "pixel_accuracy")  # fmt: skip
LOWER = (
    "ece",
    "error",
    "ce",
    "mean_error",
    "mean_error_all",
    "mce",
    "relative_mce",
    "flips",
    "mfr",
    "top5_distance",
)
NEITHER = (
    "confidence",
    *(f"attention_{name}" for name in ("entropy", "overfocus", "gini", "peak", "distance", "diversity")),
)


def percent(metric: str) -> bool:
    """Whether a metric is a share that people read in percent."""
    return metric in PERCENT or metric.startswith(
        ("top1_of", "top5_of", "knn", "iou_", "mean_miou", "retention")
    )


def better(metric: str) -> str:
    """higher, lower, or nothing where neither is better."""
    return "" if metric in NEITHER else "lower" if metric in LOWER else "higher"


@dataclass(frozen=True, eq=False)
class Number:
    """A number of the card with its 95 % interval; `samples` are those of the resampled data sets."""

    setting: str
    metric: str
    value: float
    low: float
    high: float
    images: int
    note: str
    samples: np.ndarray

    def text(self, *, spread: bool = True) -> str:
        """For people: percent where it is one."""
        scale, digits = (
            (100, 1)
            if percent(self.metric)
            else (1, 1 if self.metric in ("mce", "relative_mce", "ce", "mfr") else 3)
        )
        if np.isnan(self.value):
            return "no number"
        half = f" ±{scale * (self.high - self.low) / 2:.{digits}f}" if spread else ""
        return f"{scale * self.value:.{digits}f}{half}"


def number_of(key: Key, samples: np.ndarray, images: int, note: str) -> Number:
    low, high = interval(samples[1:]) if len(samples) > 1 else (samples[0], samples[0])
    return Number(*key, float(samples[0]), float(low), float(high), images, note, samples)


def resampled_ece(right: np.ndarray, sure: np.ndarray, repeats: int, seed: int) -> np.ndarray:
    """ECE of the data and of every resampled data set, with the same draws as `bootstrap`."""
    known = ~np.isnan(right + sure)
    place = np.clip(np.searchsorted(np.linspace(0, 1, BINS + 1), np.where(known, sure, 0)) - 1, 0, BINS - 1)
    gap = np.zeros((len(right), BINS))
    gap[np.arange(len(right)), place] = np.where(known, right - sure, 0)
    out = [np.abs(gap.sum(0)).sum(keepdims=True) / known.sum()]
    for taken in draws(len(right), repeats, seed):
        with np.errstate(invalid="ignore", divide="ignore"):
            out.append(np.abs(taken @ gap).sum(1) / (taken @ known.astype(np.float64)))
    return np.concatenate(out)


def table_csv(records: Iterable[dict[str, Any]]) -> str:
    """Records as comma-separated text."""
    out, found = io.StringIO(), list(records)
    if found:
        writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()} for record in found
        )
    return out.getvalue()


def label(metric: str) -> str:
    """A metric's name for people."""
    known = {
        "mce": "mCE",
        "relative_mce": "relative mCE",
        "ece": "ECE",
        "mfr": "mFR",
        "ce": "CE",
        "top1": "top-1",
        "top5": "top-5",
    }
    known |= {"miou": "mIoU", "mean_miou": "mean mIoU", "mean_miou_cityscapes_c": "mean mIoU, Cityscapes-C protocol",
              "retention_cityscapes_c": "retention, Cityscapes-C protocol"}  # fmt: skip
    if metric.startswith("iou_"):
        return f"IoU {metric.removeprefix('iou_')}"
    for word, text in (("top1_of_", "top-1 of "), ("top5_of_", "top-5 of "), ("knn", "k = ")):
        if metric.startswith(word):
            return text + metric.removeprefix(word).replace("_", ", ")
    return known.get(metric, metric.replace("_", " "))
