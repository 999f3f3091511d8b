"""Out-of-distribution detection: the data against the images of another folder (docs/equations.md#ood).

| setting | metrics and scores |
| --- | --- |
| `in_distribution`: the data | max_probability, energy |
| `ood/NAME`: the images of a folder | the same; auroc_max_probability, fpr95_energy, ... |

`energy` is the negative energy, log Σ exp of the logits: as the probability, higher on images of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from steadygaze.data.folders import Item
from steadygaze.data.images import images_in, names_hash, read_image
from steadygaze.errors import InputError
from steadygaze.quantity import Quantity
from steadygaze.robustness.detection import auroc, fpr95
from steadygaze.runs.card import Card
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.settings import (
    BarChart,
    Condition,
    Figure,
    Measurement,
    Score,
    Setting,
    Table,
    bar,
    share,
)
from steadygaze.runs.statistics import draws
from steadygaze.runs.suite import ImageSet, Suite, register_suite

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch

IN = "in_distribution"
PROBABILITY = share("max_probability", better="neither", summary="probability of the predicted class")
ENERGY = Quantity("energy", better="neither", summary="negative energy: log of the summed exp of the logits")
MEASURES: dict[str, Callable[..., float]] = {"auroc": auroc, "fpr95": fpr95}
DETECTION = {
    (measure, metric.name): share(
        f"{measure}_{metric.name}", better="higher" if measure == "auroc" else "lower"
    )
    for metric in (PROBABILITY, ENERGY)
    for measure in MEASURES
}


class OutsideReader:
    """Reads an image."""

    ready = False

    def read(self, item: Item) -> Image.Image:
        return read_image(item.path)


@register_suite("ood")
class OutOfDistribution(Suite):
    """Can images that are none of the data be told from it?"""

    title = "Out-of-distribution detection"
    summary = "The data against images of another folder: AUROC and FPR95 of maximum probability and energy."
    argument = "NAME=FOLDER"
    needs_files = True
    quantities = (PROBABILITY, ENERGY, *DETECTION.values())
    compared = ("ood",)

    def check(self) -> None:
        self.folders: dict[str, Path] = {}
        for argument in self.arguments or ("",):
            name, equals, folder = argument.partition("=")
            if not equals:
                name, folder = Path(argument).name, argument
            if not name or not folder or "/" in name or name in self.folders:
                raise InputError(
                    f"expected ood:NAME=FOLDER, each NAME once and without a slash, got ood:{argument}",
                    option="suites",
                )
            self.folders[name] = Path(folder)

    def open(self, limit: int | None) -> None:
        self.items = {
            name: [Item(path.relative_to(folder).as_posix(), path, None) for path in images_in(folder)][
                :limit
            ]
            for name, folder in self.folders.items()
        }
        for name, items in self.items.items():
            if not items:
                raise InputError(f"ood: expected images in {self.folders[name]}, found none", option="suites")

    def facts(self) -> dict[str, Any]:
        return {self.name: {name: names_hash(i.name for i in items) for name, items in self.items.items()}}

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        setting = Setting(self.name, IN)
        yield Condition(self.name, (setting,), (PROBABILITY, ENERGY), unchanged=True)

    def image_sets(self, evaluator: Evaluator) -> Iterator[ImageSet]:
        reader = OutsideReader()
        for name, items in self.items.items():
            images = tuple(RunImage(f"{name}:{item.name}", (), item, reader) for item in items)
            setting = Setting(self.name, name, source=name, label=f"ood/{name}")
            yield ImageSet(name, images, (Condition(self.name, (setting,), (PROBABILITY, ENERGY)),))

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """Both scores of each image."""
        from steadygaze.robustness.ood import max_probability, negative_energy

        logits = evaluator.logits(batch.first)
        broken = evaluator.broken_rows(logits)
        logits = logits.nan_to_num(0.0, 0.0, 0.0)
        values = {PROBABILITY: max_probability(logits), ENERGY: negative_energy(logits)}
        return [
            Measurement(condition.setting, metric, scores.cpu().numpy(), None, broken)
            for metric, scores in values.items()
        ]

    def scores(self, card: Card) -> Iterator[Score]:
        for setting in card.measured_settings():
            if setting.suite != self.name or not setting.source:
                continue
            for metric in (PROBABILITY, ENERGY):
                if (IN, metric.name) not in card.measured or (
                    setting.label,
                    metric.name,
                ) not in card.measured:
                    continue
                inside, outside = (card.values(label, metric.name) for label in (IN, setting.label))
                inside, outside = (values[~np.isnan(values)] for values in (inside, outside))
                if not len(inside) or not len(outside):
                    continue
                samples = resampled_detection(inside, outside, card.repeats, card.seed)
                note = f"{len(inside)} images of the data, {len(outside)} others"
                for measure, values in samples.items():
                    quantity = DETECTION[measure, metric.name]
                    yield Score(setting, quantity, values, len(inside) + len(outside), note, headline=True)

    def tables(self, card: Card) -> Iterator[Table]:
        labels = dict.fromkeys(label for label, metric in card.scores if metric == "auroc_energy")
        rows = [
            [label.removeprefix("ood/"), *(card.text(label, q.name) for q in DETECTION.values())]
            for label in labels
        ]
        if rows:
            columns = ["images", *(quantity.title for quantity in DETECTION.values())]
            yield Table("out-of-distribution detection, %", columns, rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        numbers = [number for (_, metric), number in card.scores.items() if metric.startswith("auroc_")]
        bars = [bar(n, f"{n.setting.name}, {n.quantity.name.removeprefix('auroc_')}", 1) for n in numbers]
        if bars:
            caption = "the data against other images; 50 is chance; whiskers are 95 % intervals"
            yield BarChart("Out-of-distribution detection", bars, "AUROC, %", caption, highest=100)


def resampled_detection(
    inside: np.ndarray, outside: np.ndarray, repeats: int, seed: int
) -> dict[str, np.ndarray]:
    """AUROC and FPR95 of the scores, then of every pair of resampled data sets."""
    samples = {name: [measure(inside, outside)] for name, measure in MEASURES.items()}
    own = (row for rows in draws(len(inside), repeats, seed) for row in rows)
    other = (row for rows in draws(len(outside), repeats, seed + 1) for row in rows)
    for a, b in zip(own, other, strict=True):
        for name, measure in MEASURES.items():
            samples[name].append(measure(inside, outside, inside_weights=a, outside_weights=b))
    return {name: np.array(values) for name, values in samples.items()}
