"""Sequences: the ten perturbations of ImageNet-P, as short videos of each image
(docs/equations.md#flip-rate).

| setting | metrics |
| --- | --- |
| `sequence/tilt`, ... | flips: share of frames whose prediction changes; top5_distance |

Scores of `sequences`: the means over perturbations, and mfr, in percent of AlexNet's flips, if all ten were
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from steadygaze.data.datasets.imagenet import PERTURBATIONS
from steadygaze.errors import InputError
from steadygaze.quantity import Quantity
from steadygaze.robustness.scores import ALEXNET_FLIPS, flip_probability, top5_distance
from steadygaze.runs.card import Card
from steadygaze.runs.settings import (
    BarChart,
    Condition,
    Figure,
    Measurement,
    Score,
    Setting,
    Table,
    Views,
    bar,
    share,
)
from steadygaze.runs.suite import Suite, register_suite

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView

FLIPS = share("flips", better="lower", summary="share of frames whose prediction changes")
TOP5_DISTANCE = Quantity("top5_distance", better="lower")
MFR = Quantity("mfr", better="lower", label="mFR", digits=1)


def square_side(evaluator: Evaluator, suite: str) -> int:
    """The side of the model's input, which must be square."""
    height, width = evaluator.preprocess.size
    if height != width:
        raise InputError(f"{suite}: expected a model with square input, this one takes {height}x{width}")
    return height


@register_suite("sequences")
class Sequences(Suite):
    """Perturbation sequences, made in memory."""

    title = "Perturbation sequences"
    summary = (
        "The ten perturbation sequences of ImageNet-P: how often the prediction flips from frame to frame."
    )
    quantities = (FLIPS, TOP5_DISTANCE, MFR)
    tiles: ClassVar = {("sequences", "mfr"): "mean flip rate"}

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        from steadygaze.robustness.corruptions.corrupt import check_settings
        from steadygaze.robustness.sequences import SETTINGS

        side = square_side(evaluator, self.name)
        metrics = (FLIPS, TOP5_DISTANCE) if evaluator.classes >= 6 else (FLIPS,)
        if evaluator.classes < 6:
            self.notes.append(
                f"top5_distance is left out: it needs 6 classes or more, the model has {evaluator.classes}"
            )
        frames = SETTINGS[check_settings(None, side, side)]
        for name in PERTURBATIONS:
            setting = Setting(self.name, name, label=f"sequence/{name}", minor=True)
            yield Condition(self.name, (setting,), metrics, views=frames[name][0])

    def make(self, image: ImageView, condition: Condition) -> Views:
        from steadygaze.robustness.sequences import sequence

        side = image.pixels().shape[0]
        return sequence(image.uncropped(), condition.setting.name, seed=image.seed, size=side)

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        return measure_flips(evaluator, condition, batch)

    def scores(self, card: Card) -> Iterator[Score]:
        yield from flip_scores(card, self.name, "", "made in memory, no video compression")

    def tables(self, card: Card) -> Iterator[Table]:
        yield from flip_tables(card, self.name, "")

    def figures(self, card: Card) -> Iterator[Figure]:
        yield from flip_figures(card, self.name, "", "")


def measure_flips(evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
    """flips and top5_distance of videos, the views of each image."""
    logits = evaluator.logits(batch.views.flatten(0, 1)).unflatten(0, batch.views.shape[:2])
    broken = evaluator.broken_rows(logits)
    frames = logits.double().nan_to_num(0.0).cpu().numpy()
    name, measurements = condition.setting.name, []
    for metric in condition.metrics:
        if metric == FLIPS:
            values = [flip_probability(video[None].argmax(2), name) for video in frames]
        else:
            values = [top5_distance(video[None], name) for video in frames]
        measurements.append(Measurement(condition.setting, metric, np.array(values), None, broken))
    return measurements


def by_perturbation(card: Card, suite: str, source: str, quantity: Quantity) -> dict[str, Setting]:
    """perturbation -> setting, of those that were measured, in the order of the paper."""
    measured = {setting.name: setting for setting in card.measured_settings(suite, quantity.name, source)}
    return {name: measured[name] for name in PERTURBATIONS if name in measured}


def flip_scores(card: Card, suite: str, source: str, origin: str) -> Iterator[Score]:
    """Means over perturbations, and the mean flip rate. origin: part of the note."""
    whole_set = Setting(suite, source or suite, source=source)
    for quantity in (FLIPS, TOP5_DISTANCE):
        settings = by_perturbation(card, suite, source, quantity)
        numbers = {name: card.measured[s.label, quantity.name] for name, s in settings.items()}
        if not numbers:
            continue
        first = next(iter(numbers.values()))
        mean = np.mean([number.samples for number in numbers.values()], axis=0)
        note = f"mean over {len(numbers)} kinds"
        yield Score(whole_set, quantity, mean, first.images, note, headline=True)
        imagenet = card.run["settings"].get("classes") == 1000
        if quantity == FLIPS and len(numbers) == len(PERTURBATIONS) and imagenet:
            rates = [number.samples / ALEXNET_FLIPS[name] for name, number in numbers.items()]
            images = max(number.images for number in numbers.values())
            note = f"ten kinds at difficulty 1, AlexNet is 100 (its rates are not confirmed); {origin}"
            yield Score(whole_set, MFR, 100 * np.mean(rates, axis=0), images, note, headline=True)


def flip_tables(card: Card, suite: str, source: str) -> Iterator[Table]:
    settings = by_perturbation(card, suite, source, FLIPS)
    if settings:
        rows = [
            [name, card.text(s.label, FLIPS.name), card.text(s.label, TOP5_DISTANCE.name)]
            for name, s in settings.items()
        ]
        yield Table(source or suite, ["kind", "flips, %", "top5_distance"], rows)


def flip_figures(card: Card, suite: str, source: str, words: str) -> Iterator[Figure]:
    settings = by_perturbation(card, suite, source, FLIPS)
    bars = [bar(card.numbers[s.label, FLIPS.name], s.name.replace("_", " ")) for s in settings.values()]
    if bars:
        title = f"Flips in perturbation sequences{words}"
        yield BarChart(title, bars, "frames whose prediction flips, %", "lower is steadier")
