"""Backgrounds: does the object or its background decide (docs/equations.md#background-gap)?

`backgrounds` mixes the objects and backgrounds of the data, which needs masks; `backgrounds_challenge:FOLDER`
reads ImageNet-9's, where the same names hold for nine classes.

| setting | metrics |
| --- | --- |
| `only_fg`, `only_bg_t`, `mixed_same` | top1, top5, confidence |
| `mixed_other` | the same, and follows_background |
| `in9/original`, `in9/mixed_rand`, ... | top1; of mixed_rand and mixed_next follows_background |

Scores: background_gap of `backgrounds` and of `in9`. The detail of follows_background is [label, class of the
background, predicted class].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from steadygaze.data.datasets.imagenet9 import CLASSES, Mixed, read_class_map, read_imagenet9
from steadygaze.data.folders import Item
from steadygaze.data.images import names_hash, read_image
from steadygaze.errors import ImageError, InputError
from steadygaze.quantity import Quantity
from steadygaze.robustness.backgrounds import background_share, mix, only_background, only_object
from steadygaze.runs.card import Card
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.settings import (
    CLEAN,
    TOP1,
    Accuracy,
    BarChart,
    Condition,
    Figure,
    Measurement,
    SampleImage,
    Score,
    Setting,
    Table,
    Views,
    bar,
    share,
)
from steadygaze.runs.suite import ImageSet, Option, Suite, register_suite
from steadygaze.seeding import image_seed

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView

SAME, OTHER = "mixed_same", "mixed_other"
KINDS = ("only_fg", "only_bg_t", SAME, OTHER)
WIDE = 0.1  # share of an image that a strip of its background has to cover, to be used with other objects
TRIED = 16  # images that are looked at for such a strip
FOLLOWS = Accuracy(
    "follows_background",
    "%",
    "lower",
    0,
    1,
    scale=100,
    summary="share of predictions that are the class of the background",
)
GAP = share(
    "background_gap", better="lower", summary="accuracy on backgrounds of the same class minus other classes"
)


@register_suite("backgrounds")
class Backgrounds(Suite):
    """Objects and backgrounds of the data, apart and mixed."""

    title = "Backgrounds"
    summary = "Object or background alone, objects on backgrounds of the same and other classes; needs masks."
    needs_masks = True
    quantities = (FOLLOWS, GAP)
    tiles: ClassVar = {
        ("backgrounds", GAP.name): "accuracy on backgrounds of the same class minus other classes",
        (OTHER, FOLLOWS.name): "predictions that are the class of the background",
    }

    def use_data(self, images: Sequence[Item] | None) -> None:
        """Images by class, whose backgrounds are used."""
        if images is None:
            raise InputError(f"{self.name}: expected a folder, whose images are mixed, got a stream")
        self.by_class: dict[int, list[Item]] = {}
        for item in images:
            if item.label is not None:
                self.by_class.setdefault(item.label, []).append(item)
        alone = [label for label, items in self.by_class.items() if len(items) < 2]
        if alone or len(self.by_class) < 2:
            raise InputError(
                f"{self.name}: expected at least two classes with two images each, whose backgrounds are "
                f"exchanged, got {len(self.by_class)} classes, {len(alone)} of them with one image"
            )

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        for kind in KINDS:
            metrics = (*evaluator.predictions, FOLLOWS) if kind == OTHER else evaluator.predictions
            yield Condition(self.name, (Setting(self.name, kind),), metrics)

    def make(self, image: ImageView, condition: Condition) -> Views:
        return image.as_model_sees(Image.fromarray(self._composed(image, condition.setting.name)))[None]

    def _composed(self, image: ImageView, kind: str) -> np.ndarray:
        pixels, mask = _with_mask(image)
        if kind == "only_fg":
            return only_object(pixels, mask)
        if kind == "only_bg_t":
            return only_background(pixels, mask)
        return mix(pixels, mask, *self._background(image, kind))

    def background_class(self, image: RunImage, seed: int) -> int:
        """The other class whose background an image gets, by its name."""
        others = [label for label in sorted(self.by_class) if label != image.labels[0]]
        rng = np.random.default_rng(image_seed(seed, f"background class {image.name}"))
        return others[int(rng.integers(len(others)))]

    def _background(self, image: ImageView, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """An image and its mask: the first drawn one with enough background, and not the image itself."""
        from steadygaze.runs.source import ImageView

        label = image.image.labels[0]
        if kind == OTHER:
            label = self.background_class(image.image, image.loader.seed)
        items = [item for item in self.by_class[label] if item.name != image.image.name]
        rng = np.random.default_rng(image_seed(image.loader.seed, f"{kind} {image.image.name}"))
        widest: tuple[float, np.ndarray, np.ndarray] | None = None
        for index in rng.permutation(len(items))[:TRIED]:
            try:
                pixels, mask = _with_mask(ImageView(RunImage.of(items[index]), image.loader))
            except ImageError:
                continue
            width = background_share(mask)
            if widest is None or width > widest[0]:
                widest = width, pixels, mask
            if width >= WIDE:
                break
        if widest is None:
            raise ImageError(f"{image.image.name}: no image of class {label} can be read, for its background")
        return widest[1], widest[2]

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """Predictions; on backgrounds of other classes also whether they follow the background."""
        logits = evaluator.logits(batch.first)
        measurements = evaluator.classify(condition.setting, logits, batch.correct)
        if FOLLOWS in condition.metrics:
            behind = [self.background_class(image, evaluator.seed) for image in batch.images]
            labels = [image.labels[0] for image in batch.images]
            predicted = logits.nan_to_num(0.0, 0.0, 0.0).argmax(1).tolist()
            broken = evaluator.broken_rows(logits)
            measurements.append(_followed(condition.setting, labels, behind, predicted, broken))
        return measurements

    def samples(self, evaluator: Evaluator, image: ImageView) -> Iterator[SampleImage]:
        for kind in KINDS:
            pixels = image.as_model_sees(Image.fromarray(self._composed(image, kind)))
            yield SampleImage(kind.replace("_", " "), Image.fromarray(pixels))

    def scores(self, card: Card) -> Iterator[Score]:
        yield from _gap(card, self.name, SAME, OTHER)

    def tables(self, card: Card) -> Iterator[Table]:
        follows = card.text(OTHER, FOLLOWS.name)
        if follows:
            rows = [["background_gap", card.text(self.name, GAP.name)], [FOLLOWS.name, follows]]
            yield Table("backgrounds, %", ["", "value"], rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        yield from _bars(card, [CLEAN.label, *KINDS], "Object and background")


@register_suite("backgrounds_challenge")
class BackgroundsChallenge(Suite):
    """ImageNet-9."""

    title = "Backgrounds challenge"
    summary = "ImageNet-9: objects and backgrounds of nine classes, apart and mixed."
    argument = "FOLDER"
    options = (Option("in_to_in9", Path, None, must_serve=True),)
    own_images = True
    quantities = (FOLLOWS, GAP)
    tiles: ClassVar = {("in9", GAP.name): "ImageNet-9: accuracy on mixed-same minus mixed-rand"}
    compared = ("backgrounds_challenge",)

    def check(self) -> None:
        if len(self.arguments) != 1 or not self.arguments[0]:
            raise InputError(
                f"expected {self.name}:FOLDER once, with images such as FOLDER/mixed_rand/val/00_dog/*.JPEG"
            )
        self.folder = Path(self.arguments[0])

    def open(self, limit: int | None) -> None:
        self.variants = {name: items[:limit] for name, items in read_imagenet9(self.folder).items()}

    def facts(self) -> dict[str, Any]:
        sets = {name: names_hash(item.name for item in items) for name, items in self.variants.items()}
        return {self.name: sets}

    def image_sets(self, evaluator: Evaluator) -> Iterator[ImageSet]:
        if evaluator.classes not in (len(CLASSES), 1000):
            raise InputError(
                f"{self.name}: expected a model with ImageNet's 1,000 classes or the nine of ImageNet-9, "
                f"but {evaluator.name} has {evaluator.classes}"
            )
        self.mapped = list(range(len(CLASSES)))
        if evaluator.classes == 1000:
            self.mapped = read_class_map(self.folder, self.values["in_to_in9"])
        for variant, items in self.variants.items():
            source = f"in9-{variant}"
            images = tuple(
                RunImage(f"{source}:{item.name}", (int(item.label or 0),), item, ChallengeReader())
                for item in items
            )
            setting = Setting(self.name, variant, source=source, label=f"in9/{variant}")
            known = any(item.background is not None for item in items)
            metrics: tuple[Quantity, ...] = (TOP1, FOLLOWS) if known else (TOP1,)
            yield ImageSet(source, images, (Condition(self.name, (setting,), metrics),))

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """Predicted classes as classes of ImageNet-9, -1 for one of none of them."""
        logits = evaluator.logits(batch.first)
        broken = evaluator.broken_rows(logits)
        predicted = [self.mapped[c] for c in logits.nan_to_num(0.0, 0.0, 0.0).argmax(1).tolist()]
        labels = [image.labels[0] for image in batch.images]
        pairs = np.array([labels, predicted]).T
        hits = (pairs[:, 0] == pairs[:, 1]).astype(np.float64)
        measurements = [Measurement(condition.setting, TOP1, hits, pairs, broken)]
        if FOLLOWS in condition.metrics:
            items = [image.item for image in batch.images]
            behind = [item.background if isinstance(item, Mixed) else None for item in items]
            measurements.append(_followed(condition.setting, labels, behind, predicted, broken))
        return measurements

    def scores(self, card: Card) -> Iterator[Score]:
        yield from _gap(card, "in9", "in9/mixed_same", "in9/mixed_rand")

    def tables(self, card: Card) -> Iterator[Table]:
        rows = [
            [setting.name, card.text(setting.label, TOP1.name), card.text(setting.label, FOLLOWS.name)]
            for setting in card.measured_settings(metric=TOP1.name)
            if setting.suite == self.name
        ]
        if rows:
            yield Table("ImageNet-9, %", ["images", TOP1.title, FOLLOWS.title], rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        labels = [s.label for s in card.measured_settings(metric=TOP1.name) if s.suite == self.name]
        yield from _bars(card, labels, "ImageNet-9")


class ChallengeReader:
    """Reads an image, which is shown as it is if it has the model's size, as the authors do."""

    ready = True

    def read(self, item: Item) -> Image.Image:
        return read_image(item.path)


def _with_mask(image: ImageView) -> tuple[np.ndarray, np.ndarray]:
    opened = image.opened()
    mask = np.asarray(image.mask(opened.size))
    if not (mask == 255).any():
        raise ImageError(f"{image.image.name}: no pixel of its mask is marked as object")
    return np.asarray(opened), mask


def _followed(
    setting: Setting,
    labels: Sequence[int],
    behind: Sequence[int | None],
    predicted: Sequence[int],
    broken: dict[int, str],
) -> Measurement:
    """Whether each prediction is the class of the background; NaN where that is not known or its own."""
    values = np.array(
        [np.nan if b is None else float(p == b) for b, p in zip(behind, predicted, strict=True)]
    )
    details = np.array([labels, [-1 if b is None else b for b in behind], predicted]).T
    return Measurement(setting, FOLLOWS, values, details, broken)


def _gap(card: Card, name: str, same: str, other: str) -> Iterator[Score]:
    """Accuracy on backgrounds of the same class minus that on others."""
    samples = [card.samples(label, TOP1) for label in (same, other)]
    if samples[0] is None or samples[1] is None:
        return
    images = card.measured[other, TOP1.name].images
    note = f"{same} minus {other}"
    setting = Setting(Backgrounds.name, name)
    yield Score(setting, GAP, samples[0] - samples[1], images, note, headline=True)


def _bars(card: Card, labels: Sequence[str], title: str) -> Iterator[Figure]:
    bars = [
        bar(card.numbers[label, TOP1.name], label.replace("_", " "), 2 if label == CLEAN.label else 1)
        for label in labels
        if (label, TOP1.name) in card.numbers
    ]
    if len(bars) > 1:
        caption = "top1; whiskers are 95 % intervals"
        yield BarChart(title, bars, "accuracy, %", caption, highest=100)
