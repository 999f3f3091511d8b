"""Neighbors: k-nearest-neighbor classification of classes the model was not trained on
(docs/equations.md#knn).

| setting | metrics |
| --- | --- |
| `neighbors/cifar-100`, ... | knn1, knn10 (cosine); knn1_euclidean, knn10_euclidean |

A bank of labeled training images is encoded first; its features are never written, so a resumed run and each
of several processes encodes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from steadygaze.data.datasets import image_sets
from steadygaze.data.folders import Item, interleave
from steadygaze.data.images import names_hash
from steadygaze.errors import InputError
from steadygaze.robustness.protocols import DISTANCES
from steadygaze.runs.card import Card
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.settings import (
    Accuracy,
    BarChart,
    Condition,
    Figure,
    Measurement,
    Setting,
    Table,
    accuracy,
    bar,
)
from steadygaze.runs.suite import ImageSet, Option, Suite, register_suite
from steadygaze.runs.suites.shift import PARTIAL

if TYPE_CHECKING:
    from torch import Tensor

    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch

SIDES = ("train", "test")
KS = (1, 10)  # neighbors that vote
EXAMPLE = "neighbors:cifar-100=/data/cifar-100-python"


def knn_quantity(metric: str, k: int) -> Accuracy:
    """The accuracy of k neighbors by a distance."""
    if metric == "cosine":
        return accuracy(f"knn{k}", f"k = {k}")
    return accuracy(f"knn{k}_{metric}", f"k = {k}, {metric}")


def parse_bank(given: Any) -> int:
    """The size of the bank."""
    size = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"bank: expected a whole number of 1 or more, got {given!r}")
    return size


@dataclass(frozen=True)
class Entry(Item):
    """An image of a set: its side, train or test, and its index there."""

    side: str = ""
    index: int = 0


@dataclass(frozen=True)
class SetReader:
    """Reads the images of a set."""

    source: image_sets.ImageSet
    ready: bool = False  # its images do not have the model's size

    def read(self, item: Item) -> Image.Image:
        assert isinstance(item, Entry)
        side = self.source.train if item.side == SIDES[0] else self.source.test
        return side[item.index]


@dataclass(frozen=True)
class OpenedSet:
    """A set with classes of its own: the images of the bank, and those that are classified."""

    name: str
    source: image_sets.ImageSet
    bank: tuple[RunImage, ...]
    images: tuple[RunImage, ...]

    def facts(self) -> dict[str, Any]:
        """What defines its numbers."""
        both = names_hash(f"{image.name}\t{image.labels[0]}" for image in (*self.bank, *self.images))
        return {
            "name": self.name,
            "bank": len(self.bank),
            "images": len(self.images),
            "hash": both,
            "classes": len(self.source.classes),
        }


class Bank:
    """The features of a bank, batch by batch."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, encoded: Float[Tensor, "b d"], labels: Int[Tensor, " b"]) -> None:
        if not encoded.isfinite().all():
            raise InputError(
                "neighbors: the model's features of the bank have NaN or infinite values, so no "
                "distance is defined"
            )
        self._parts.append((encoded, labels))

    @property
    def whole(self) -> tuple[Float[Tensor, "m d"], Int[Tensor, " m"]]:
        """Features and labels."""
        import torch

        if len(self._parts) != 1:
            encoded = torch.cat([part for part, _ in self._parts])
            self._parts = [(encoded, torch.cat([labels for _, labels in self._parts]))]
        return self._parts[0]


@register_suite("neighbors")
class Neighbors(Suite):
    """k-NN in the model's features."""

    title = "Nearest neighbors"
    summary = (
        "k-nearest-neighbor accuracy in the model's features, on classes it was not trained on. FOLDER has "
        "train/ and test/, or is a published dataset; or give NAME=TRAIN=TEST."
    )
    argument = "NAME=FOLDER"
    options = (Option("bank", parse_bank, None), PARTIAL)
    own_images = True
    quantities = tuple(knn_quantity(metric, k) for metric, k in product(DISTANCES, KS))
    compared = ("neighbors",)

    def check(self) -> None:
        self.folders: dict[str, tuple[Path, ...]] = {}
        for argument in self.arguments or ("",):
            name, *folders = argument.split("=")
            if not name or "/" in name or len(folders) not in (1, 2) or not all(folders):
                raise InputError(
                    "expected neighbors:NAME=FOLDER or neighbors:NAME=TRAIN=TEST, such as "
                    f"{EXAMPLE}, got {f'neighbors:{argument}'!r}"
                )
            if name in self.folders:
                raise InputError(f"{name} is given twice. Use a different name for each set.")
            self.folders[name] = tuple(map(Path, folders))

    def open(self, limit: int | None) -> None:
        self.sets = {name: self._opened(name, folders, limit) for name, folders in self.folders.items()}
        self.banks: dict[str, Bank] = {}
        for name, one in self.sets.items():
            self.notes += [f"{name}: {note}" for note in one.source.notes]

    def _opened(self, name: str, folders: tuple[Path, ...], limit: int | None) -> OpenedSet:
        """The set in these folders, at most `bank` and `limit` images of its sides, spread evenly over the
        classes."""
        source = image_sets.read_image_set(name, *folders, partial=self.values["partial"])
        reader = SetReader(source)
        sides = []
        for side, images, most in zip(
            SIDES, (source.train, source.test), (self.values["bank"], limit), strict=True
        ):
            groups = [_entries(name, side, images, label) for label in range(len(source.classes))]
            chosen = interleave([group for group in groups if group])[:most]
            sides.append(tuple(RunImage(e.name, (int(e.label or 0),), e, reader) for e in chosen))
        return OpenedSet(name, source, bank=sides[0], images=sides[1])

    def facts(self) -> dict[str, Any]:
        return {"neighbors": [one.facts() for one in self.sets.values()]}

    def image_sets(self, evaluator: Evaluator) -> Iterator[ImageSet]:
        import torch

        from steadygaze.robustness.neighbors import features

        blank = torch.zeros(1, 3, *evaluator.preprocess.size, device=evaluator.device, dtype=evaluator.dtype)
        features(evaluator.model, blank)  # raises if the model has no features that can be compared
        for name, one in self.sets.items():
            metrics = tuple(knn_quantity(m, k) for m, k in product(DISTANCES, KS) if k <= len(one.bank))
            setting = Setting(self.name, name, source=name, label=f"neighbors/{name}")
            yield ImageSet(
                name, one.images, (Condition(self.name, (setting,), metrics),), references=one.bank
            )

    def reference(self, evaluator: Evaluator, image_set: str, batch: Batch) -> None:
        from steadygaze.robustness.neighbors import features

        encoded = features(evaluator.model, batch.first)
        self.banks.setdefault(image_set, Bank()).add(encoded, batch.labels.to(encoded.device))

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        from steadygaze.robustness.neighbors import features, knn_predict

        setting = condition.setting
        if setting.source not in self.banks:
            raise InputError(f"neighbors: no image of the bank of {setting.source} could be read")
        known, classes = self.banks[setting.source].whole
        queries = features(evaluator.model, batch.first)
        broken = evaluator.broken_rows(queries)
        queries = queries.nan_to_num(0.0, 0.0, 0.0) if broken else queries
        measurements = []
        for metric, k in product(DISTANCES, KS):
            quantity = knn_quantity(metric, k)
            if quantity in condition.metrics:
                hits = knn_predict(known, classes, queries, k=k, metric=metric) == batch.labels
                note = f"bank of {len(known)} images"
                values = hits.double().cpu().numpy()
                measurements.append(Measurement(setting, quantity, values, None, broken, note))
        return measurements

    def tables(self, card: Card) -> Iterator[Table]:
        settings = [s for s in card.measured_settings() if s.suite == self.name]
        if not settings:
            return
        metrics = card.metrics_of(setting.label for setting in settings)
        banks = {one["name"]: str(one["bank"]) for one in card.run["settings"].get("neighbors", ())}
        rows = []
        for setting in settings:
            texts = [card.text(setting.label, metric.name) for metric in metrics]
            images = card.numbers[setting.label, metrics[0].name].images
            rows.append([setting.name, *texts, str(images), banks.get(setting.name, "")])
        columns = ["set", *(metric.title for metric in metrics), "images", "bank"]
        yield Table("accuracy of the k nearest neighbors, %", columns, rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        bars = [
            bar(card.numbers[s.label, quantity.name], f"{s.name}, {quantity.title}", 3)
            for s in card.measured_settings()
            for quantity in (knn_quantity("cosine", k) for k in KS)
            if (s.label, quantity.name) in card.numbers
        ]
        if bars:
            caption = "by the nearest images in its features, cosine; whiskers are 95 % intervals"
            yield BarChart("Classes it was not trained on", bars, "accuracy, %", caption, highest=100)


def _entries(name: str, side: str, images: image_sets.ImagePart, label: int) -> list[Item]:
    entries: list[Item] = []
    for index in np.flatnonzero(images.labels == label).tolist():
        source = images.sources[index]
        path = source if isinstance(source, Path) else Path(f"{index:06d}")
        short_name = f"{path.parent.name}/{path.name}" if isinstance(source, Path) else path.name
        entries.append(Entry(f"{name}:{side}/{short_name}", path, label, None, side, index))
    return entries
