"""Shift: published data sets of shifted ImageNet images (docs/equations.md#shift-accuracy).

| setting | metrics |
| --- | --- |
| `imagenet-a`, `imagenet-c/fog/3`, ... | top1, top5, confidence; top1_of_200, ... among the set's classes |
| `imagenet-p/tilt`: published videos | flips, top5_distance |

Scores of `imagenet-c` and `imagenet-p` are those of the suites corruptions and sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from steadygaze.data.datasets.shifts import READERS, Shift, Shifted, read_clip, read_shift
from steadygaze.data.datasets.tree import abbreviated
from steadygaze.data.folders import Item
from steadygaze.data.images import names_hash
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.runs.card import Card
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.settings import (
    CONFIDENCE,
    ECE,
    TOP1,
    TOP5,
    BarChart,
    Condition,
    Figure,
    Measurement,
    Score,
    Setting,
    Table,
    Views,
    bar,
    restricted,
)
from steadygaze.runs.suite import ImageSet, Option, Suite, register_suite
from steadygaze.runs.suites import corruptions, sequences
from steadygaze.runs.suites.sequences import FLIPS, TOP5_DISTANCE

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView

CORRUPTED, VIDEOS = "imagenet-c", "imagenet-p"  # sets whose parts are settings of their own
FRAMES = 31  # of a published video, about
PUBLISHED_C, PUBLISHED_P = ", published ImageNet-C", ", published ImageNet-P"


def parse_flag(given: Any) -> bool:
    """True or False, also as text."""
    if isinstance(given, bool):
        return given
    text = str(given).lower()
    if text not in ("true", "false", "1", "0"):
        raise InputError(f"partial: expected True or False, got {given!r}")
    return text in ("true", "1")


PARTIAL = Option("partial", parse_flag, False)


@dataclass(frozen=True)
class VideoReader:
    """The first frame of a video, to see whether it can be read."""

    ready: bool = False

    def read(self, item: Item) -> Image.Image:
        return Image.fromarray(read_clip(item.path)[0])


@register_suite("shift")
class ShiftSuite(Suite):
    """Data sets of shifted images."""

    title = "Shifts"
    summary = f"Published data sets of shifted ImageNet images: {', '.join(READERS)}."
    argument = "NAME=FOLDER"
    options = (PARTIAL, *corruptions.CORRUPTION_OPTIONS)
    own_images = True
    tiles: ClassVar = {
        (CORRUPTED, "mce"): "mCE, published ImageNet-C",
        (VIDEOS, "mfr"): "mean flip rate, published ImageNet-P",
    }
    compared = ("shifts",)

    def check(self) -> None:
        self.folders: dict[str, Path] = {}
        for argument in self.arguments or ("",):
            name, _, folder = argument.partition("=")
            if not name or not folder:
                given = f"shift:{argument}" if argument else "shift"
                raise InputError(
                    f"expected shift:NAME=FOLDER, such as shift:imagenet-a=/data/imagenet-a, got {given!r}"
                )
            if name not in READERS:
                raise UnknownNameError("shift", name, READERS)
            if name in self.folders:
                raise InputError(
                    f"{name} is given twice: {self.folders[name]} and {folder}. Start a run for each."
                )
            self.folders[name] = Path(folder)

    def open(self, limit: int | None) -> None:
        self.limit, self.shifts = limit, {}
        for name, folder in self.folders.items():
            parts = {key: self.values[key] for key in ("corruptions", "severities")}
            shift = read_shift(
                name, folder, partial=self.values["partial"], **(parts if name == CORRUPTED else {})
            )
            self.shifts[name] = shift
            self.notes += [f"{name}: {note}" for note in shift.notes]
            self.notes += [
                f"{name}: {len(which)} left out: {reason} ({abbreviated(which)})"
                for reason, which in shift.left_out.items()
            ]

    def facts(self) -> dict[str, Any]:
        return {"shifts": [_facts(shift) for shift in self.shifts.values()]}

    def image_sets(self, evaluator: Evaluator) -> Iterator[ImageSet]:
        """Each set; of ImageNet-C and -P, the images of each corruption and severity by themselves."""
        for shift in self.shifts.values():
            if evaluator.classes != 1000:
                raise InputError(
                    f"{shift.name}: its classes are ImageNet's 1,000, but {evaluator.name} has "
                    f"{evaluator.classes}: they do not map"
                )
            apart = shift.name in (CORRUPTED, VIDEOS)
            groups: dict[str, list[RunImage]] = {}
            for item in shift.items:
                group = groups.setdefault(item.group if apart else "", [])
                if self.limit is None or len(group) < self.limit:
                    group.append(self._image(item, shift))
            for name, images in groups.items():
                condition = self._condition(shift, name, evaluator)
                yield ImageSet(shift.name, tuple(images), (condition,))

    def _image(self, item: Shifted, shift: Shift) -> RunImage:
        reader = VideoReader() if shift.name == VIDEOS else shift
        return RunImage(f"{shift.name}:{item.name}", item.right, item, reader, item.group)

    def _condition(self, shift: Shift, group: str, evaluator: Evaluator) -> Condition:
        if shift.name == VIDEOS:
            setting = Setting(self.name, group, source=shift.name, label=f"{shift.name}/{group}")
            return Condition(self.name, (setting,), (FLIPS, TOP5_DISTANCE), views=FRAMES, single=True)
        if shift.name == CORRUPTED:
            name, _, severity = group.partition(":")
            label = f"{shift.name}/{name}/{severity}"
            setting = Setting(self.name, name, int(severity), shift.name, label, minor=True)
        else:
            setting = Setting(self.name, shift.name, source=shift.name)
        metrics = list(evaluator.predictions)
        if shift.classes is not None:
            metrics += [restricted(k, len(shift.classes)) for k in (1, 5)]
        return Condition(self.name, (setting,), tuple(metrics), unchanged=True)

    def make(self, image: ImageView, condition: Condition) -> Views:
        if condition.setting.source != VIDEOS:
            return image.pixels()[None]
        assert image.image.item is not None
        frames = read_clip(image.image.item.path)
        if frames.shape[1:3] == image.size:  # as the published protocol wants
            return frames
        return np.stack([image.as_model_sees(Image.fromarray(frame)) for frame in frames])

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """Accuracy among all classes, and among the official ones where the protocol restricts them."""
        if condition.setting.source == VIDEOS:
            return sequences.measure_flips(evaluator, condition, batch)
        logits = evaluator.logits(batch.first)
        measurements = evaluator.classify(condition.setting, logits, batch.correct)
        classes = self.shifts[condition.setting.source].classes
        if classes is not None:
            measurements += evaluator.classify(condition.setting, logits, batch.correct, classes)
        return measurements

    def scores(self, card: Card) -> Iterator[Score]:
        yield from corruptions.corruption_scores(card, self.name, CORRUPTED, "the published images")
        yield from sequences.flip_scores(card, self.name, VIDEOS, "the published videos")

    def tables(self, card: Card) -> Iterator[Table]:
        rows = [
            [setting.label, metric.title, card.text(setting.label, metric.name)]
            for setting, metric in _restricted(card)
        ]
        if rows:
            yield Table("accuracy among the classes of the set, %", ["setting", "metric", "value"], rows)
        yield from corruptions.corruption_tables(card, self.name, CORRUPTED)
        yield from sequences.flip_tables(card, self.name, VIDEOS)

    def figures(self, card: Card) -> Iterator[Figure]:
        bars = [
            bar(card.numbers[setting.label, metric.name], f"{setting.label}, {metric.title}", 1)
            for setting, metric in _restricted(card)
        ]
        if bars:
            caption = "whiskers are 95 % intervals"
            yield BarChart("Accuracy among the classes of the set", bars, "accuracy, %", caption, highest=100)
        yield from corruptions.corruption_figures(card, self.name, CORRUPTED, PUBLISHED_C)
        yield from sequences.flip_figures(card, self.name, VIDEOS, PUBLISHED_P)


def _restricted(card: Card) -> list[tuple[Setting, Any]]:
    """The settings with an accuracy among the classes of their set, and that metric."""
    everywhere = (TOP1, TOP5, CONFIDENCE, ECE, FLIPS, TOP5_DISTANCE)
    settings = [s for s in card.measured_settings() if s.suite == ShiftSuite.name]
    return [(s, m) for s in settings for m in card.metrics_of([s.label]) if m not in everywhere]


def _facts(shift: Shift) -> dict[str, Any]:
    return {
        "name": shift.name,
        "images": len(shift.items),
        "hash": names_hash(f"{item.name}\t{item.right}" for item in shift.items),
        "classes": None if shift.classes is None else len(shift.classes),
    }
