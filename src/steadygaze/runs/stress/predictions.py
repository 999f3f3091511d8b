"""The clean images, which every run over data measures, and what all predictions have: calibration, and the
table and chart of every setting that is part of no series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float

from steadygaze.robustness.calibration import BINS
from steadygaze.runs.figures import Bar, BarChart, Figure, Table
from steadygaze.runs.stress.quantities import CONFIDENCE, ECE, TOP1, TOP5
from steadygaze.runs.stress.setting import CLEAN
from steadygaze.runs.stress.suite import Condition, Score, Suite
from steadygaze.runs.table import draws

if TYPE_CHECKING:
    from steadygaze.runs.stress.card import Card
    from steadygaze.runs.stress.evaluator import Evaluator
    from steadygaze.runs.stress.suite import Number


class Predictions(Suite):
    """Clean images; runs beside every suite that is measured on a classifier."""

    name = CLEAN.suite
    title = "Accuracy by set"
    quantities = (TOP1, TOP5, CONFIDENCE, ECE)
    tiles: ClassVar = {
        ("clean", "top1"): "accuracy on clean images",
        ("clean", "top5"): "correct class among the first five",
        ("clean", "ece"): "expected calibration error",
    }

    def conditions(self, evaluator: Evaluator) -> Iterable[Condition]:
        if TOP5 not in evaluator.predictions:
            self.notes.append(f"top5 is left out: the model has {evaluator.classes} classes")
        yield Condition(self.name, (CLEAN,), evaluator.predictions, unchanged=True)

    def numbers(self, card: Card, population: str) -> Iterator[Score]:
        """The expected calibration error of every setting with predictions."""
        measured = []
        for setting in card.measured_settings(metric=TOP1.name):
            if setting.population != population or CONFIDENCE not in card.metrics_of([setting.label]):
                continue
            correct = card.values(setting.label, TOP1.name)
            confidence = card.values(setting.label, CONFIDENCE.name)
            if (~np.isnan(correct + confidence)).any():
                measured.append((setting, correct, confidence))
        samples = resampled_ece([pair for _, *pair in measured], card.repeats, card.seed)
        for (setting, correct, confidence), own in zip(measured, samples, strict=True):
            count = int((~np.isnan(correct + confidence)).sum())
            yield Score(setting, ECE, own, count, f"{BINS} bins")

    def tables(self, card: Card) -> Iterator[Table]:
        """Clean, shifts, attacks, ...: every setting with predictions that is part of no series."""
        settings = [s for s in card.measured_settings(metric=TOP1.name) if not s.minor]
        if not settings:
            return
        has_top5 = any(name == TOP5.name for _, name in card.keys)
        metrics = [TOP1, *([TOP5] if has_top5 else []), CONFIDENCE, ECE]
        rows = [
            [
                setting.label,
                *(card.text(setting.label, metric.name) for metric in metrics),
                str(card.numbers[setting.label, TOP1.name].images),
            ]
            for setting in settings
        ]
        yield Table(
            "accuracy, confidence and ece (expected calibration error), %",
            ["setting", *(m.title for m in metrics), "images"],
            rows,
        )

    def figures(self, card: Card) -> Iterator[Figure]:
        bars = [
            bar(card.numbers[s.label, TOP1.name], s.label.replace("_", " "), 2 if s == CLEAN else 1)
            for s in card.measured_settings(metric=TOP1.name)
            if not s.minor
        ]
        if len(bars) > 1:
            caption = "top1; whiskers are 95 % intervals"
            yield BarChart("Accuracy by set", bars, "accuracy, %", caption, highest=100)


def bar(number: Number, name: str, group: int = 0) -> Bar:
    """A number as a bar, in percent."""
    return Bar(name, 100 * number.value, 100 * number.low, 100 * number.high, group)


def resampled_ece(settings: Sequence[Sequence[np.ndarray]], repeats: int, seed: int) -> list[np.ndarray]:
    """ECE of the data and of every resampled data set, with the same draws as `bootstrap`, for each setting.

    ECE of few images is biased upwards, and that of a resampled data set, with fewer distinct images, even
    more. Resampled values are shifted by the mean of that excess (docs/equations.md#ece).

    settings: correct and confidence (n,) of the same images
    """
    if not settings:
        return []
    known = [~np.isnan(correct + confidence) for correct, confidence in settings]
    samples = []
    for (correct, confidence), own in zip(settings, known, strict=True):
        gaps = _gaps(correct, confidence, own)
        samples.append([np.abs(gaps.sum(0)).sum(keepdims=True) / own.sum()])
    for counts in draws(len(known[0]), repeats, seed):
        totals = counts @ np.stack(known, 1).astype(np.float64)
        for k, (correct, confidence) in enumerate(settings):
            gaps = _gaps(correct, confidence, known[k])  # made again: those of all settings take much memory
            with np.errstate(invalid="ignore", divide="ignore"):
                samples[k].append(np.abs(counts @ gaps).sum(1) / totals[:, k])
    return [_without_excess(np.concatenate(pieces)) for pieces in samples]


def _without_excess(samples: np.ndarray) -> np.ndarray:
    """The value and its resampled values, these shifted so that their mean is the value; at least 0."""
    value, resampled = samples[:1], samples[1:]
    if not len(resampled):
        return samples
    return np.concatenate([value, np.maximum(resampled - (np.nanmean(resampled) - value), 0.0)])


def _gaps(correct: np.ndarray, confidence: np.ndarray, known: np.ndarray) -> Float[np.ndarray, "n bins"]:
    """Correct minus confidence of each image, in the column of its bin."""
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.clip(np.searchsorted(edges, np.where(known, confidence, 0)) - 1, 0, BINS - 1)
    gaps = np.zeros((len(correct), BINS))
    gaps[np.arange(len(correct)), bins] = np.where(known, correct - confidence, 0)
    return gaps


def with_predictions(suites: list[Suite], evaluator: Evaluator) -> list[Suite]:
    """The suites, and clean accuracy if the model gives classes."""
    return [Predictions(), *suites] if evaluator.outputs == "classes" else list(suites)
