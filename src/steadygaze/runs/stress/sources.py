"""The images of a stress run's data: labelled files of a folder, or batches in memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadygaze.data.benchmarks import folders_in, some
from steadygaze.data.confusion import IGNORED
from steadygaze.data.content import names_hash, tensor_hash
from steadygaze.data.folders import Classes
from steadygaze.data.images import below
from steadygaze.data.label_maps import Segmented, find_maps
from steadygaze.data.masks import Labelled, find
from steadygaze.errors import BadInput
from steadygaze.loading.loaded import LoadedModel
from steadygaze.robustness.attacks import pixels_of
from steadygaze.runs.normalisation import Normalisation, check_levels
from steadygaze.runs.stress.images import Pixels, RunImage


@dataclass(frozen=True)
class ImageBatch:
    """Images that go through all conditions together.

    pixels, given, label_maps: by name, for data in memory: 8-bit pixels, the images as they were given, and label maps
    """

    images: tuple[RunImage, ...]
    pixels: dict[str, Pixels] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    label_maps: dict[str, np.ndarray] = field(default_factory=dict)


# -- folders ------------------------------------------------------------------------------------------------------


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
    ) -> FolderData:
        if folder is None:
            return cls(None, Labelled([]), batch_size)
        if not label_maps:
            labelled = find(folder, masks, Classes(loaded.class_names, classes), limit)
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
    def images(self) -> list[RunImage]:
        return [RunImage.of(item) for item in self.labelled.items]

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
                f"{len(empty)} class folders of {self.folder.name} have no image (incomplete download?): {some(empty)}"
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


# -- memory -------------------------------------------------------------------------------------------------------


class MemoryData:
    """Batches (images, labels) of tensors; images normalised, labels (B,), or label maps (B, H, W) of a segmenter.

    Images are called "0", "1", ... in order.
    """

    def __init__(self, data: Any, *, label_maps: bool, limit: int | None, batch_size: int) -> None:
        self.label_maps, self.limit = label_maps, limit
        if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
            data = torch.utils.data.DataLoader(data, batch_size=batch_size)
        self._rest = self._tensors(data)
        first = next(self._rest, None)
        if first is None:
            raise BadInput("data: expected at least one batch, got none (an iterator that was used up?)")
        self.first = first

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images."""
        height, width = self.first[0].shape[2:]
        return height, width

    def check_normalisation(self, normalisation: Normalisation, model: str) -> list[str]:
        """A note on a normalisation that is neither known nor seen in the images; a wrong one is an error."""
        images, statistics = self.first[0], (normalisation.mean, normalisation.std)
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
        images, labels = self.first
        levels = _grey_levels(images, normalisation)
        facts: dict[str, Any] = {
            "pictures": None,
            "pictures_hash": tensor_hash(levels, labels),
            "data": "in memory",
            "limit": self.limit,
        }
        if self.label_maps:
            facts["segments"] = list(range(classes))
        return facts

    def batches(self, normalisation: Normalisation, classes: int) -> Iterator[ImageBatch]:
        start = 0
        for number, (images, labels) in enumerate(_chain(self.first, self._rest)):
            self._check_range(labels, classes, number)
            yield self._batch(images, labels, start, normalisation)
            start += len(images)

    def _batch(self, images: Tensor, labels: Tensor, start: int, normalisation: Normalisation) -> ImageBatch:
        names = [str(start + i) for i in range(len(images))]
        classes = [0] * len(labels) if self.label_maps else labels.tolist()
        levels = _grey_levels(images, normalisation).numpy()
        maps = labels.cpu().numpy() if self.label_maps else ()
        return ImageBatch(
            tuple(RunImage(name, (label,)) for name, label in zip(names, classes, strict=True)),
            {name: np.ascontiguousarray(one) for name, one in zip(names, levels, strict=True)},
            dict(zip(names, images, strict=True)),
            dict(zip(names, maps, strict=True)) if self.label_maps else {},
        )

    def _check_range(self, labels: Tensor, classes: int, number: int) -> None:
        known = labels[labels != IGNORED] if self.label_maps else labels
        if known.numel() and (int(known.min()) < 0 or int(known.max()) >= classes):
            got = f"{int(known.min())}..{int(known.max())}"
            raise BadInput(f"labels: expected classes 0..{classes - 1}, got {got} in batch {number}")

    def _tensors(self, data: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Checked batches, `limit` images at most."""
        count = 0
        for number, given in enumerate(data):
            images, labels = self._checked(given, number)
            kept = len(images) if self.limit is None else min(len(images), self.limit - count)
            if kept <= 0:
                return
            yield images[:kept], labels[:kept]
            count += kept

    def _checked(self, given: Any, number: int) -> tuple[Tensor, Tensor]:
        pair = isinstance(given, (tuple, list)) and len(given) >= 2
        if not pair or not all(isinstance(x, Tensor) for x in given[:2]):
            pieces = isinstance(given, (tuple, list))
            kinds = [type(x).__name__ for x in given] if pieces else type(given).__name__
            raise BadInput(
                f"data: expected batches (images, labels) of tensors, got {kinds} as batch {number}"
            )
        images, labels = given[0], given[1]
        if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point() or not len(images):
            raise BadInput(
                "images: expected (B, 3, H, W), floating point and normalised, got "
                f"{images.dtype} {tuple(images.shape)}"
            )
        wanted = (len(images), *images.shape[2:]) if self.label_maps else (len(images),)
        if labels.is_floating_point() or labels.dtype == torch.bool or labels.shape != wanted:
            expected = f"label maps {wanted} of integers" if self.label_maps else f"{len(images)} integers"
            raise BadInput(
                f"labels: expected {expected}, got {labels.dtype} of shape {tuple(labels.shape)} in batch {number}"
            )
        return images, labels


def _chain(first: Any, rest: Iterable[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _grey_levels(images: Tensor, normalisation: Normalisation) -> Tensor:
    """(B, H, W, 3) uint8, with the normalisation undone."""
    pixels = pixels_of(images, normalisation.mean, normalisation.std)[0]
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def images_of(batches: Sequence[ImageBatch]) -> list[RunImage]:
    return [image for batch in batches for image in batch.images]
