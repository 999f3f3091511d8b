"""Cue conflict: whether shape or texture decides (docs/equations.md#shape-bias).

| setting | metrics and scores |
| --- | --- |
| `cue_conflict` | shape_decisions, texture_decisions: shares of all images; shape_bias |
| `cue_conflict/cat`, ... | shape_bias of the images with that shape |

A row of shape_decisions has [shape, texture, decision] as its detail, indices of the 16 classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from steadygaze.data.datasets.cue_conflict import IMAGENET_CLASSES, CueItem, read_cue_conflict
from steadygaze.data.folders import Item
from steadygaze.data.images import names_hash, read_image
from steadygaze.errors import InputError
from steadygaze.runs.card import Card
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.settings import (
    Accuracy,
    BarChart,
    Condition,
    Figure,
    Measurement,
    Number,
    Score,
    Setting,
    Table,
    bar,
)
from steadygaze.runs.statistics import resampled_share
from steadygaze.runs.suite import ImageSet, Suite, register_suite
from steadygaze.runs.suites.shift import PARTIAL

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch


def _share(name: str, label: str, summary: str) -> Accuracy:
    return Accuracy(name, "%", "neither", 0, 1, label=label, scale=100, summary=summary)


SHAPE = _share("shape_decisions", "shape decisions", "share of images whose shape decides")
TEXTURE = _share("texture_decisions", "texture decisions", "share of images whose texture decides")
SHAPE_BIAS = _share(
    "shape_bias", "shape bias", "share of shape decisions among decisions for shape or texture"
)


class CueReader:
    """Reads an image."""

    ready = False

    def read(self, item: Item) -> Image.Image:
        return read_image(item.path)


@register_suite("cue_conflict")
class CueConflictSuite(Suite):
    """Shape or texture."""

    title = "Shape or texture"
    summary = "Shape bias on cue-conflict images: the shape of one class with the texture of another."
    argument = "FOLDER"
    options = (PARTIAL,)
    own_images = True
    quantities = (SHAPE, TEXTURE, SHAPE_BIAS)
    tiles: ClassVar = {("cue_conflict", SHAPE_BIAS.name): "shape bias"}
    compared = ("cue_conflict",)

    def check(self) -> None:
        if len(self.arguments) != 1 or not self.arguments[0]:
            raise InputError(
                "expected cue_conflict:FOLDER once, with images such as FOLDER/cat/cat1-truck3.png, got "
                f"{', '.join(f'cue_conflict:{one}' for one in self.arguments) or 'cue_conflict'}"
            )
        self.folder = Path(self.arguments[0])

    def open(self, limit: int | None) -> None:
        self.source = read_cue_conflict(self.folder, partial=self.values["partial"])
        self.items = self.source.items[:limit]
        self.notes += [f"{self.name}: {note}" for note in self.source.notes]
        if self.source.agreeing:
            self.notes.append(f"{self.name}: {self.source.agreeing} images left out: both cues are one class")

    def facts(self) -> dict[str, Any]:
        groups = {name: list(indices) for name, indices in self.source.groups.items()}
        names = names_hash(item.name for item in self.items)
        return {self.name: {"images": len(self.items), "hash": names, "groups": groups}}

    def image_sets(self, evaluator: Evaluator) -> Iterator[ImageSet]:
        if evaluator.classes != IMAGENET_CLASSES:
            raise InputError(
                f"{self.name}: its 16 classes are groups of ImageNet's 1,000, but {evaluator.name} has "
                f"{evaluator.classes} classes: they do not map. Use a model with ImageNet's classifier."
            )
        reader = CueReader()
        images = tuple(
            RunImage(f"{self.name}:{item.name}", (int(item.label or 0),), item, reader) for item in self.items
        )
        setting = Setting(self.name, self.name, source=self.name)
        yield ImageSet(self.name, images, (Condition(self.name, (setting,), (SHAPE, TEXTURE)),))

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """Which cue the model's decision among the 16 classes agrees with."""
        from steadygaze.robustness.cue_conflict import group_decisions

        logits = evaluator.logits(batch.first)
        broken = evaluator.broken_rows(logits)
        groups = list(self.source.groups.values())
        decision = group_decisions(logits.nan_to_num(0.0, 0.0, 0.0), groups).cpu().numpy()
        items = [image.item for image in batch.images]
        cues = np.array([(item.label, item.texture) for item in items if isinstance(item, CueItem)])
        details = np.column_stack([cues, decision])
        by_shape, by_texture = ((decision == cues[:, i]).astype(np.float64) for i in (0, 1))
        return [
            Measurement(condition.setting, SHAPE, by_shape, details, broken),
            Measurement(condition.setting, TEXTURE, by_texture, None, broken),
        ]

    def scores(self, card: Card) -> Iterator[Score]:
        whole = card.settings.get(self.name)
        if whole is None or (self.name, SHAPE.name) not in card.measured:
            return
        by_shape, by_texture = (card.values(self.name, metric.name) for metric in (SHAPE, TEXTURE))
        decided = by_shape + by_texture
        everything = np.ones(len(decided), dtype=bool)
        groups: dict[str, list[int]] = card.run["settings"][self.name]["groups"]
        shapes = _shapes(card, len(decided))
        parts = {whole: everything}
        for index, name in enumerate(groups):
            label = f"{self.name}/{name}"
            parts[Setting(self.name, name, None, self.name, label, minor=True)] = shapes == index
        for setting, part in parts.items():
            known = part & (decided > 0)
            if not known.any():
                continue
            samples = resampled_share(by_shape, known, card.repeats, card.seed)
            count = int((part & ~np.isnan(decided)).sum())
            note = f"{int(known.sum())} of {count} images decided by shape or texture"
            yield Score(
                setting,
                SHAPE_BIAS,
                samples,
                int(known.sum()),
                note,
                headline=setting == whole,
                shares=by_shape[known],
            )

    def tables(self, card: Card) -> Iterator[Table]:
        rows = []
        for number in _shape_biases(card):
            name = "all" if not number.setting.minor else number.setting.name
            rows.append([name, number.text(), str(number.images)])
        if rows:
            yield Table("shape bias by shape class, %", ["class", SHAPE_BIAS.title, "shape or texture"], rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        bars = [
            bar(
                number,
                number.setting.name if number.setting.minor else "all",
                1 if number.setting.minor else 2,
            )
            for number in _shape_biases(card)
        ]
        if bars:
            caption = (
                "share of shape decisions among decisions for shape or texture; whiskers are 95 % intervals"
            )
            yield BarChart("Shape bias by shape class", bars, "shape bias, %", caption, highest=100)


def _shape_biases(card: Card) -> list[Number]:
    """The shape bias of all images, then of each shape class."""
    return [number for (_, metric), number in card.scores.items() if metric == SHAPE_BIAS.name]


def _shapes(card: Card, count: int) -> np.ndarray:
    """The shape class of each image, in order of name; -1 where the prediction was broken."""
    details = card.details(CueConflictSuite.name, SHAPE.name)
    if not np.isin(details.lengths, (0, 3)).all():
        raise InputError(
            "expected three numbers behind shape_decisions: shape, texture and decision, got others"
        )
    shapes = np.full(count, -1)
    shapes[details.ranks[details.lengths > 0]] = details.numbers.reshape(-1, 3)[:, 0]
    return shapes
