"""Segmentation: clean and corrupted images of a segmenter (docs/equations.md#miou). Run alone.

| setting | metrics |
| --- | --- |
| `clean`, `fog/3`, ... | miou |

A row's value is the image's own mIoU, its detail [class, correct, predicted, true, ...]: pixels of each class
that is in the label map or in the prediction. Data set numbers add these counts over images before they
divide.

| score | setting | what |
| --- | --- | --- |
| miou, pixel_accuracy, iou_CLASS | `clean`, `fog/3`; miou of `fog` | of summed counts; by class: clean |
| miou | `acdc/fog`, `acdc/night`, ... | the clean images of each condition of ACDC |
| mean_miou, retention | `corruptions` | mean over corruptions, share of clean mIoU; also `_cityscapes_c` |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from colorsys import hsv_to_rgb
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from steadygaze.data.datasets.acdc import ACDC, ACDC_CONDITIONS, acdc_condition
from steadygaze.errors import InputError
from steadygaze.quantity import Quantity, iou_from_counts, plural
from steadygaze.robustness.mean_miou import CITYSCAPES_C, NOISE, mean_miou, retention
from steadygaze.runs.card import Card, Details
from steadygaze.runs.settings import (
    BROKEN_LOGITS,
    CLEAN,
    Condition,
    Figure,
    Measurement,
    SampleImage,
    Score,
    Setting,
    Table,
    Views,
    share,
)
from steadygaze.runs.statistics import draws
from steadygaze.runs.suite import Suite, register_suite
from steadygaze.runs.suites.corruptions import (
    CORRUPTION_OPTIONS,
    by_corruption,
    corrupted,
    corruption_setting,
    error_bars,
    sample_settings,
    severities_of,
    severity_lines,
)

if TYPE_CHECKING:
    from torch import Tensor

    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView

CONDITION = "acdc/"  # begins the labels of the conditions of ACDC
FEW = 8  # classes whose IoU is printed one by one
MIOU = share("miou", "mIoU")
PIXEL_ACCURACY = share("pixel_accuracy")
MEAN_MIOU = share("mean_miou", "mean mIoU")
RETENTION = share("retention")
CITYSCAPES = "Cityscapes-C protocol"
MEAN_MIOU_CITYSCAPES = share("mean_miou_cityscapes_c", f"mean mIoU, {CITYSCAPES}")
RETENTION_CITYSCAPES = share("retention_cityscapes_c", f"retention, {CITYSCAPES}")


def iou_quantity(class_name: str) -> Quantity:
    """The IoU of one class."""
    return share(f"iou_{class_name}", f"IoU {class_name}")


@register_suite("segmentation")
class Segmentation(Suite):
    """A segmenter on clean and corrupted images."""

    title = "Segmentation"
    summary = "mIoU of a segmenter on clean and corrupted images; run alone, needs label maps."
    options = CORRUPTION_OPTIONS
    label_maps = True
    samples_note = "colored by the class that the model predicts for each pixel"
    quantities = (
        MIOU,
        PIXEL_ACCURACY,
        MEAN_MIOU,
        RETENTION,
        MEAN_MIOU_CITYSCAPES,
        RETENTION_CITYSCAPES,
    )
    tiles: ClassVar = {
        ("clean", "miou"): "clean, mIoU",
        ("corruptions", "mean_miou"): "mean mIoU, corrupted",
        ("corruptions", "retention"): "retention",
        ("corruptions", "mean_miou_cityscapes_c"): "mean mIoU, Cityscapes-C protocol",
    }
    uneven_details = frozenset({MIOU.name})

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        yield Condition(self.name, (CLEAN,), (MIOU,), unchanged=True)
        for name in self.values["corruptions"]:
            for severity in self.values["severities"]:
                yield Condition(self.name, (corruption_setting(name, severity),), (MIOU,))

    def make(self, image: ImageView, condition: Condition) -> Views:
        pixels = image.pixels() if condition.setting == CLEAN else corrupted(image, condition.setting)
        return pixels[None]

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """miou of each image, with its counts."""
        import torch

        from steadygaze.data.label_maps import confusion, miou, overlaps
        from steadygaze.robustness.segmentation import label_map

        assert batch.label_maps is not None
        parts = batch.first.split(evaluator.batch_size)
        predicted = torch.cat([label_map(evaluator.model, part) for part in parts])
        broken = (predicted == -1).all((1, 2)).nonzero()[:, 0].tolist()
        maps = batch.label_maps.to(predicted.device)
        counts = confusion(predicted.clamp_min(0), maps, evaluator.classes)
        values = miou(counts).double().cpu().numpy()
        details = [packed(one) for one in overlaps(counts)]
        flags = dict.fromkeys(broken, BROKEN_LOGITS)
        return [Measurement(condition.setting, MIOU, values, details, flags)]

    def samples(self, evaluator: Evaluator, image: ImageView) -> Iterator[SampleImage]:
        """Colored by the class that the model predicts for each pixel."""
        yield SampleImage("clean", _tinted(evaluator, image.pixels()))
        for setting in sample_settings(self):
            title = setting.words
            yield SampleImage(title, _tinted(evaluator, corrupted(image, setting)))

    def numbers(self, card: Card, population: str) -> Iterator[Score]:
        """mIoU, pixel accuracy and IoU by class of summed counts."""
        for setting in card.measured_settings(None, MIOU.name):
            if setting.population != population:
                continue
            names = card.run["settings"]["segments"]
            details = card.details(setting.label, MIOU.name)
            counts = unpacked(details, len(names))
            mean, accuracy, by_class = set_numbers(resampled(counts, card.repeats, card.seed))
            readable = int((details.lengths > 0).sum())
            yield Score(setting, MIOU, mean, readable)
            yield Score(setting, PIXEL_ACCURACY, accuracy, readable)
            if setting == CLEAN:
                for index, name in enumerate(names):
                    yield Score(setting, iou_quantity(name), by_class[:, index], readable)

    def scores(self, card: Card) -> Iterator[Score]:
        if card.run["settings"].get("layout") == ACDC:
            yield from condition_scores(card)
        settings = by_corruption(card, "corruptions", "", MIOU)
        samples = {
            name: {level: card.measured[s.label, MIOU.name].samples for level, s in levels.items()}
            for name, levels in settings.items()
        }
        if samples:
            yield from segmentation_scores(samples, card.samples(CLEAN.label, MIOU), card.image_count)

    def tables(self, card: Card) -> Iterator[Table]:
        if (CLEAN.label, MIOU.name) not in card.numbers:
            return
        names = card.run["settings"]["segments"]
        classes = [iou_quantity(name) for name in names] if len(names) <= FEW else []
        clean = [MIOU, PIXEL_ACCURACY, *classes]
        texts = [card.text(CLEAN.label, quantity.name) for quantity in clean]
        yield Table("clean, %", ["", *(quantity.title for quantity in clean)], [["clean", *texts]])
        conditions = [
            label for label, metric in card.scores if label.startswith(CONDITION) and metric == MIOU.name
        ]
        if conditions:
            columns = ["condition", MIOU.title, "images"]
            rows = [
                [label.removeprefix(CONDITION), card.text(label, MIOU.name), str(number.images)]
                for label in conditions
                for number in (card.scores[label, MIOU.name],)
            ]
            yield Table(f"{ACDC}, %", columns, rows)
        settings = by_corruption(card, "corruptions", "", MIOU)
        if not settings:
            return
        severities, rows = severities_of(settings), []
        for name, levels in settings.items():
            cells = [
                card.text(levels[s].label, MIOU.name, spread=False) if s in levels else "" for s in severities
            ]
            rows.append([name, *cells, card.text(name, MIOU.name)])
        columns = ["corruption", *(f"{MIOU.title} at {s}" for s in severities), "mean"]
        yield Table("segmentation, %", columns, rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        settings = by_corruption(card, "corruptions", "", MIOU)
        if settings:
            labels = {name: name for name in settings}
            yield error_bars(card, labels, MIOU, "mIoU by corruption", "mIoU")
            yield from severity_lines(card, settings, MIOU, "mIoU by severity", "mIoU, %")


def condition_scores(card: Card) -> Iterator[Score]:
    """mIoU of the clean images of each condition of ACDC, of summed counts."""
    names = card.names_of("")
    details = card.details(CLEAN.label, MIOU.name)
    counts = unpacked(details, len(card.run["settings"]["segments"]))
    measured = np.zeros(details.images, dtype=bool)
    measured[details.ranks] = details.lengths > 0
    for condition in ACDC_CONDITIONS:
        own = np.array([acdc_condition(name) == condition for name in names]) & measured
        if own.any():
            only = np.where(own[:, None, None], counts, 0)
            mean, _, _ = set_numbers(resampled(only, card.repeats, card.seed))
            setting = Setting(Segmentation.name, "acdc", condition, label=f"{CONDITION}{condition}")
            yield Score(setting, MIOU, mean, int(own.sum()), f"{ACDC}, {condition}", headline=True)


def _tinted(evaluator: Evaluator, pixels: np.ndarray) -> Image.Image:
    """The image, half of it the color of the predicted class: each class has a hue of its own."""
    import torch

    from steadygaze.robustness.segmentation import label_map

    image = evaluator.normalize(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])
    predicted = label_map(evaluator.model, image)[0].cpu().numpy()
    hues = np.array([hsv_to_rgb((0.62 + 0.618034 * c) % 1, 0.8, 0.9) for c in range(256)])
    return Image.fromarray((0.5 * pixels + 127.5 * hues[predicted]).astype(np.uint8))


def packed(counts: Int[Tensor, "3 c"]) -> np.ndarray:
    """[class, correct, predicted, true, ...] of the classes that are there."""
    import torch

    present = counts[1:].sum(0).nonzero()[:, 0]
    return torch.stack([present, *counts[:, present]], 1).flatten().cpu().numpy()


def unpacked(details: Details, classes: int) -> Float[np.ndarray, "n 3 c"]:
    """The counts of every image at its rank; zero where there is none."""
    if (details.lengths % 4).any() or (details.numbers % 1).any():
        raise InputError("expected groups of four whole numbers behind the mIoU of an image, got others")
    each = details.numbers.astype(np.int64).reshape(-1, 4)
    ranks = np.repeat(details.ranks, details.lengths // 4)
    counts = np.zeros((details.images, 3, classes))
    counts[ranks, :, each[:, 0]] = each[:, 1:]
    return counts


def resampled(counts: Float[np.ndarray, "n 3 c"], repeats: int, seed: int) -> Float[np.ndarray, "r 3 c"]:
    """The summed counts of the data set, and of every resampled one, with the same draws as `bootstrap`."""
    flat = counts.reshape(len(counts), -1)
    sums = [flat.sum(0, keepdims=True), *(taken @ flat for taken in draws(len(flat), repeats, seed))]
    return np.concatenate(sums).reshape(-1, *counts.shape[1:])


def set_numbers(sums: Float[np.ndarray, "r 3 c"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mIoU (r,), share of correct pixels (r,) and IoU by class (r, c), NaN where there is none, of summed
    counts."""
    by_class = iou_from_counts(*np.moveaxis(sums, 1, 0))
    present = ~np.isnan(by_class)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(present, by_class, 0).sum(1) / present.sum(1)
        accuracy = sums[:, 0].sum(1) / sums[:, 2].sum(1)
    return mean, accuracy, by_class


def segmentation_scores(
    samples: dict[str, dict[int, np.ndarray]], clean: np.ndarray | None, images: int
) -> Iterator[Score]:
    """From mIoU by corruption and severity: the mean of each corruption, the mean over them by both
    protocols, and the share of the clean mIoU that is retained."""
    for name, levels in samples.items():
        note = f"severities {', '.join(map(str, levels))}"
        mean = np.mean(list(levels.values()), axis=0)
        yield Score(Setting("corruptions", name), MIOU, mean, images, note)
    whole_set = Setting("corruptions", "corruptions")
    what = f"{plural(len(samples), 'corruption')}, severities {_severities(samples.values())}"
    note = f"{what}; made in memory; {images} images"
    mean = mean_miou(samples, "all")
    yield Score(whole_set, MEAN_MIOU, mean, images, note, headline=True)
    if clean is not None:
        note = f"mean mIoU / clean mIoU; {note}"
        yield Score(whole_set, RETENTION, retention(mean, clean), images, note, headline=True)
    cityscapes = {
        name: {level: value for level, value in levels.items() if name not in NOISE or level <= 3}
        for name, levels in samples.items()
        if name in CITYSCAPES_C
    }
    cityscapes = {name: levels for name, levels in cityscapes.items() if levels}
    if not cityscapes:
        return
    note = (
        f"{len(cityscapes)} of the 16 corruptions of Cityscapes-C, severities "
        f"{_severities(cityscapes.values())}, "
        f"of noise up to 3; made in memory; {images} images"
    )
    mean = mean_miou(samples, "cityscapes-c")
    yield Score(whole_set, MEAN_MIOU_CITYSCAPES, mean, images, note, headline=True)
    if clean is not None:
        note = f"mean mIoU / clean mIoU; {note}"
        yield Score(whole_set, RETENTION_CITYSCAPES, retention(mean, clean), images, note, headline=True)


def _severities(samples: Iterable[dict[int, np.ndarray]]) -> str:
    return ", ".join(map(str, sorted({level for levels in samples for level in levels})))
