"""The images of a stress run's data: labelled files of a folder or a stream, or batches in memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadygaze.data.benchmarks import folders_in, some
from steadygaze.data.confusion import IGNORED
from steadygaze.data.content import names_hash, tensor_hash
from steadygaze.data.folders import Classes, Unlabelled
from steadygaze.data.images import below
from steadygaze.data.label_maps import Segmented, find_maps
from steadygaze.data.masks import Decode, Labelled, find
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.sources import InMemoryData, TensorBatch
from steadygaze.data.streams import ImageStream, StreamSpec, open_stream
from steadygaze.data.streams.stream import read_ahead
from steadygaze.errors import BadInput
from steadygaze.loading.loaded import LoadedModel
from steadygaze.robustness.attacks import pixels_of
from steadygaze.runs.normalisation import Normalisation, check_levels
from steadygaze.runs.request import Request
from steadygaze.runs.stress.images import Pixels, RunImage

SAMPLES = 64  # images of a stream that are kept, to be stored with the run


@dataclass(frozen=True)
class ImageBatch:
    """Images that go through all conditions together.

    pixels, given, label_maps: by name, for data in memory: 8-bit pixels, the images as they were given, and
        label maps
    """

    images: tuple[RunImage, ...]
    pixels: dict[str, Pixels] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    label_maps: dict[str, np.ndarray] = field(default_factory=dict)


# -- folders ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderData:
    """The labelled images of a folder; for a segmenter, with label maps. folder None: no images."""

    folder: Path | None
    labelled: Labelled
    batch_size: int

    @classmethod
    def read(
        cls,
        folder: Path | None,
        masks: Path | None,
        loaded: LoadedModel,
        classes: int,
        *,
        label_maps: bool,
        limit: int | None,
        batch_size: int,
        labels_used: bool = True,
    ) -> FolderData:
        if folder is None:
            return cls(None, Labelled([]), batch_size)
        if not label_maps:
            lookup = Classes(loaded.class_names, classes) if labels_used else Unlabelled()
            labelled = find(folder, masks, lookup, limit)
        else:
            labelled = find_maps(folder, masks, limit=limit)
            if labelled.classes != classes:
                raise BadInput(
                    f"segmentation: {loaded.name} has {classes} classes, the masks of {folder} "
                    f"({labelled.layout}) have {labelled.classes}"
                )
        _check_labels(labelled, loaded.name)
        return cls(folder, labelled, batch_size)

    @property
    def count(self) -> int:
        return len(self.labelled.items)

    @property
    def decode(self) -> Decode | None:
        return self.labelled.decode

    @property
    def images(self) -> list[RunImage]:
        return [RunImage.of(item) for item in self.labelled.items]

    def labels(self, classes: int) -> list[int]:
        """The classes that occur."""
        return sorted({image.labels[0] for image in self.images})

    def batches(self) -> Iterator[ImageBatch]:
        images = self.images
        for start in range(0, len(images), self.batch_size):
            yield ImageBatch(tuple(images[start : start + self.batch_size]))

    def facts(self) -> dict[str, Any]:
        """What defines the numbers of the run."""
        lines = [f"{image.name}\t{image.labels}" for image in self.images]
        facts: dict[str, Any] = {
            "pictures": len(lines) or None,
            "pictures_hash": names_hash(lines) if lines else None,
            "layout": self.labelled.layout,
        }
        if isinstance(self.labelled, Segmented):
            facts["segments"] = list(self.labelled.names or range(self.labelled.classes))
        return facts

    def notes(self) -> Iterator[str]:
        """What is missing or left out."""
        empty = self._empty_folders()
        if self.folder is not None and empty:
            yield (
                f"{len(empty)} class folders of {self.folder.name} have no image (incomplete download?): "
                f"{some(empty)}"
            )
        if self.labelled.without:
            yield f"{self.labelled.without} images have no mask and are left out"

    def _empty_folders(self) -> list[str]:
        if self.folder is None or self.labelled.layout not in ("class folders", "pairs"):
            return []
        return [name for name in folders_in(self.folder) if not any(below(self.folder / name))]


def _check_labels(labelled: Labelled, model: str) -> None:
    counts = Counter(item.name for item in labelled.items)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"{twice} is listed twice: every image of a run counts once")
    unknown = next((item.name for item in labelled.items if item.label is None), None)
    if unknown is not None:
        raise BadInput(
            f"{unknown}: its class is not one of {model}'s. Every image needs a label that the model knows."
        )


# -- streams ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamData:
    """Labelled images of a stream; the first ones are kept, to be stored as samples of the run."""

    stream: ImageStream
    batch_size: int
    first_images: list[RunImage] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        spec: StreamSpec,
        loaded: LoadedModel,
        classes: int,
        request: Request,
        *,
        label_maps: bool,
        labels_used: bool,
    ) -> StreamData:
        if label_maps:
            raise BadInput(f"segmentation: expected a folder of images with label maps, got {spec}")
        lookup = Classes(loaded.class_names, classes) if labels_used else Unlabelled()
        return cls(open_stream(spec, lookup, limit=request.limit), request.batch_size)

    @cached_property
    def count(self) -> int | None:
        return self.stream.count()

    @property
    def decode(self) -> Decode | None:
        return self.stream.decode

    def labels(self, classes: int) -> list[int]:
        """All classes: which ones occur is not known before the data is read."""
        return list(range(classes))

    def batches(self) -> Iterator[ImageBatch]:
        items = read_ahead(self.stream)
        self.first_images.clear()
        while batch := tuple(RunImage.of(item) for item in islice(items, self.batch_size)):
            self.first_images.extend(batch[: SAMPLES - len(self.first_images)])
            yield ImageBatch(batch)

    def facts(self) -> dict[str, Any]:
        """What defines the numbers of the run."""
        return self.stream.facts(self.stream.first())

    def notes(self) -> Iterator[str]:
        return iter(())


# -- memory ----------------------------------------------------------------------------------------


class MemoryData:
    """Batches in memory (see `data.sources`); images are called "0", "1", ... in order."""

    def __init__(
        self,
        data: Any,
        *,
        label_maps: bool = False,
        limit: int | None = None,
        batch_size: int = 16,
        preprocess: Preprocess | None = None,
        labels_used: bool = True,
    ) -> None:
        self.label_maps, self.limit = label_maps, limit
        self.source = InMemoryData(
            data,
            batch_size=batch_size,
            limit=limit,
            label_maps=label_maps,
            preprocess=preprocess,
            labels_used=labels_used,
        )
        self._batches = iter(self.source)
        self.first = next(self._batches)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images."""
        height, width = self.first.images.shape[2:]
        return height, width

    def check_normalisation(self, normalisation: Normalisation, model: str) -> list[str]:
        """A note on a normalisation that is neither known nor seen in the images; a wrong one is an error."""
        images, statistics = self.first.images, (normalisation.mean, normalisation.std)
        pixels_of(images, *statistics)
        if check_levels(images, statistics) or normalisation.known:
            return []
        note = (
            f"{model} does not declare how its images are normalised: ImageNet's mean and std are assumed. "
            "Give mean= and std= if they are others"
        )
        warnings.warn(note, stacklevel=5)
        return [note]

    def facts(self, normalisation: Normalisation, classes: int) -> dict[str, Any]:
        """What defines the numbers of the run."""
        levels = _grey_levels(self.first.images, normalisation)
        facts: dict[str, Any] = {
            "pictures": None,
            "pictures_hash": tensor_hash(levels, self.first.labels),
            "data": "in memory",
            "limit": self.limit,
        }
        if self.label_maps:
            facts["segments"] = list(range(classes))
        return facts

    def batches(self, normalisation: Normalisation, classes: int) -> Iterator[ImageBatch]:
        """Every batch; each only once, since the data may be a generator."""
        for number, batch in enumerate(chain([self.first], self._batches)):
            self._check_range(batch.labels, classes, number)
            yield self._image_batch(batch, normalisation)

    def _image_batch(self, batch: TensorBatch, normalisation: Normalisation) -> ImageBatch:
        classes = [0] * len(batch) if self.label_maps else batch.labels.tolist()
        levels = _grey_levels(batch.images, normalisation).numpy()
        maps = batch.labels.cpu().numpy() if self.label_maps else ()
        return ImageBatch(
            tuple(RunImage(name, (label,)) for name, label in zip(batch.names, classes, strict=True)),
            {name: np.ascontiguousarray(one) for name, one in zip(batch.names, levels, strict=True)},
            dict(zip(batch.names, batch.images, strict=True)),
            dict(zip(batch.names, maps, strict=True)) if self.label_maps else {},
        )

    def _check_range(self, labels: Tensor, classes: int, number: int) -> None:
        known = labels[labels != IGNORED] if self.label_maps else labels
        if known.numel() and (int(known.min()) < 0 or int(known.max()) >= classes):
            got = f"{int(known.min())}..{int(known.max())}"
            raise BadInput(f"labels: expected classes 0..{classes - 1}, got {got} in batch {number}")


def _grey_levels(images: Tensor, normalisation: Normalisation) -> Tensor:
    """(B, H, W, 3) uint8, with the normalisation undone."""
    pixels = pixels_of(images, normalisation.mean, normalisation.std)[0]
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
