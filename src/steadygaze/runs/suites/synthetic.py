"""Synthetic: the object of each image moved, turned, resized, or before another background, after SI-Score.

| setting | metrics |
| --- | --- |
| `location/0.1,0.9`, `rotation/21`, `size/0.05` | top1, top5, confidence |
| `background/removed`, `background/swapped` | the same |

Scores: top1 of `location`, `rotation`, `size`: means over the values of the factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from steadygaze.data.folders import Item
from steadygaze.data.images import images_in, read_image
from steadygaze.errors import ImageError
from steadygaze.robustness.synthetic import (
    FACTORS,
    POSITIONS,
    remove_background,
    square,
    swap_background,
    vary,
)
from steadygaze.runs.card import Card
from steadygaze.runs.settings import (
    TOP1,
    Condition,
    Figure,
    Heatmap,
    Line,
    LineChart,
    Score,
    Setting,
    Table,
    Views,
    level_text,
)
from steadygaze.runs.suite import Option, Suite, register_suite
from steadygaze.runs.suites.sequences import square_side

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import ImageView, Pixels

GRAY = 128
BACKGROUND = "background"
AXES = {"size": "area of the object's box, %", "rotation": "degrees"}


@register_suite("synthetic")
class Synthetic(Suite):
    """Images composed of an object and a background."""

    title = "Synthetic images"
    summary = "The object of each image moved, rotated, resized, and on other backgrounds; needs masks."
    options = (Option("backgrounds", Path, None, must_serve=True),)
    needs_masks = True
    compared = ("backgrounds",)

    def open(self, limit: int | None) -> None:
        folder = self.values["backgrounds"]
        paths = [] if folder is None else images_in(folder)
        self.backgrounds = tuple(Item(path.relative_to(folder).as_posix(), path, None) for path in paths)
        self._opened: dict[int, Pixels] = {}

    def facts(self) -> dict[str, Any]:
        return {"backgrounds": len(self.backgrounds)}

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        square_side(evaluator, self.name)
        metrics = evaluator.predictions
        for factor, values in FACTORS.items():
            settings = tuple(Setting(self.name, factor, value, minor=True) for value in values)
            yield Condition(self.name, settings, metrics, views=len(values))
        for kind in ("removed", "swapped") if self.backgrounds else ("removed",):
            yield Condition(self.name, (Setting(self.name, BACKGROUND, kind),), metrics)
        if not self.backgrounds:
            self.notes.append(
                "synthetic: objects are shown on plain gray, and none is moved to another background: "
                "no folder of backgrounds was given"
            )

    def make(self, image: ImageView, condition: Condition) -> Views:
        opened = image.opened()
        pixels, mask = np.asarray(opened), np.asarray(image.mask(opened.size))
        if not (mask == 255).any():
            assert image.image.item is not None
            raise ImageError(f"{image.image.item.mask}: no pixel is marked as object")
        setting, side = condition.setting, image.size[0]
        if setting.name == BACKGROUND and setting.level == "removed":
            return image.as_model_sees(Image.fromarray(remove_background(pixels, mask)))[None]
        index = image.seed % max(1, len(self.backgrounds))
        background = self._background(index, side)
        if setting.name == BACKGROUND:
            return image.as_model_sees(Image.fromarray(swap_background(pixels, mask, background)))[None]
        composed = vary(pixels, mask, [background], setting.name, seed=image.seed, side=side)
        return np.stack([one.pixels for one in composed])

    def _background(self, index: int, side: int) -> Pixels:
        if index not in self._opened:
            if self.backgrounds:
                self._opened[index] = square(np.asarray(read_image(self.backgrounds[index].path)), side)
            else:
                self._opened[index] = np.full((side, side, 3), GRAY, np.uint8)
        return self._opened[index]

    def scores(self, card: Card) -> Iterator[Score]:
        for factor, settings in self._by_factor(card).items():
            numbers = [card.measured[setting.label, TOP1.name] for setting in settings]
            mean = np.mean([number.samples for number in numbers], axis=0)
            note = f"mean over {len(numbers)} values"
            yield Score(Setting(self.name, factor), TOP1, mean, numbers[0].images, note)

    def _by_factor(self, card: Card) -> dict[str, list[Setting]]:
        measured = card.measured_settings(self.name, TOP1.name)
        by_factor = {factor: [s for s in measured if s.name == factor] for factor in FACTORS}
        return {factor: settings for factor, settings in by_factor.items() if settings}

    def tables(self, card: Card) -> Iterator[Table]:
        rows = []
        for factor, settings in self._by_factor(card).items():
            numbers = [card.numbers[setting.label, TOP1.name] for setting in settings]
            worst, best = min(numbers, key=lambda n: n.value), max(numbers, key=lambda n: n.value)
            ends = [text for n in (worst, best) for text in (n.text(), level_text(n.setting.level))]
            rows.append([factor, card.text(factor, TOP1.name), *ends])
        if rows:
            yield Table(
                "synthetic images, accuracy, %", ["factor", "mean", "worst", "at", "best", "at"], rows
            )

    def figures(self, card: Card) -> Iterator[Figure]:
        by_factor = self._by_factor(card)
        for factor, axis in AXES.items():
            numbers = [card.numbers[s.label, TOP1.name] for s in by_factor.get(factor, ())]
            if len(numbers) > 1:
                scale = 100 if factor == "size" else 1
                xs = [scale * n.setting.level for n in numbers if isinstance(n.setting.level, int | float)]
                limits = [(100 * n.low, 100 * n.high) for n in numbers]
                line = Line(factor, xs, [100 * n.value for n in numbers], 0, limits)
                yield LineChart(f"By {factor}", [line], axis, "accuracy, %")
        numbers = [card.numbers[s.label, TOP1.name] for s in by_factor.get("location", ())]
        if numbers:
            by_position = {n.setting.level: 100 * n.value for n in numbers}
            values = [[by_position.get((x, y), float("nan")) for x in POSITIONS] for y in POSITIONS]
            yield Heatmap("By location", values, "left to right", "top to bottom", "accuracy, %")
