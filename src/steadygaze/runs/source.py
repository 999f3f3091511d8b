"""The images of a stress run: labeled files of a folder or a stream, or batches in memory.

Worker processes beside the model turn them into what the model is shown: uint8, resized and cropped, before
normalization. A job is one batch of images under one condition.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from steadygaze.data.datasets.tree import abbreviated, subfolders
from steadygaze.data.folders import ClassLookup as Classes
from steadygaze.data.folders import Item, Unlabeled
from steadygaze.data.images import bytes_hash, names_hash, read_image, source_hash, tensor_hash
from steadygaze.data.images import images_below as below
from steadygaze.data.label_maps import IGNORED
from steadygaze.data.label_maps import SegmentationImages as Segmented
from steadygaze.data.label_maps import find_label_maps as find_maps
from steadygaze.data.masks import Decode, read_mask
from steadygaze.data.masks import LabeledImages as Labeled
from steadygaze.data.masks import find_labeled_images as find
from steadygaze.data.memory import InMemoryData, TensorBatch
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.data.streams import ImageStream, open_stream, read_ahead
from steadygaze.errors import ImageError, InputError
from steadygaze.loading.loaded import LoadedModel
from steadygaze.robustness.attacks import pixels_of
from steadygaze.runs.loop import Inputs, Job
from steadygaze.runs.prepare import Normalization, check_levels
from steadygaze.runs.request import Request
from steadygaze.runs.settings import Condition, Views
from steadygaze.seeding import image_seed

Pixels = UInt8[np.ndarray, "h w 3"]

REMEMBERED = 2  # batches of images that a worker keeps for the next condition


class ViewMaker(Protocol):
    """The part of a suite that runs in worker processes."""

    def make(self, image: ImageView, condition: Condition) -> Views:
        """The views that the condition makes of one image."""
        ...


class Reader(Protocol):
    """Reads the images of a suite's own set. ready: they have the model's size and are shown without
    resizing."""

    @property
    def ready(self) -> bool: ...

    def read(self, item: Item) -> Image.Image: ...


@dataclass(frozen=True)
class RunImage:
    """One image of the run: its name in the rows, every correct class, its file, and who reads it (None: it
    is of the data). group: a part of a set, noted in its rows."""

    name: str
    labels: tuple[int, ...]
    item: Item | None = None
    reader: Reader | None = None
    group: str = ""

    @classmethod
    def of(cls, item: Item) -> RunImage:
        return cls(item.name, () if item.label is None else (item.label,), item)


@dataclass(frozen=True)
class StressJob(Job):
    """Some images of one batch under one condition. set_name: of the image set, for references."""

    run_images: tuple[RunImage, ...] = ()
    condition: Condition | None = None
    set_name: str = ""


@dataclass(frozen=True)
class Batch:
    """Images under one condition.

    Attributes:
        views: (B, V, 3, H, W); as a worker makes them 8-bit, as a suite measures them normalized.
        label_maps: (B, H, W), of a segmenter.
    """

    images: Sequence[RunImage]
    views: Float[Tensor, "b v c h w"] | UInt8[Tensor, "b v c h w"]
    label_maps: Int[Tensor, "b h w"] | UInt8[Tensor, "b h w"] | None = None

    @property
    def first(self) -> Tensor:
        """The first view, which most conditions have alone."""
        return self.views[:, 0]

    @property
    def correct(self) -> list[tuple[int, ...]]:
        """Every correct class of each image."""
        return [image.labels for image in self.images]

    @property
    def labels(self) -> Int[Tensor, " b"]:
        """The label of each image, the first of the correct classes."""
        return torch.tensor([image.labels[0] for image in self.images], device=self.views.device)


@dataclass
class ImageLoader:
    """Makes the images of a job.

    Attributes:
        memory: Pixels by name, for data in memory; None: images are read from files.
        given: By name, images in memory as they were given, normalized.
        decode: How masks are read              with_label_maps: whether every image comes with a label map.
        label_maps: By name; of images in memory all of them.
    """

    seed: int
    suites: Mapping[str, ViewMaker]
    preprocess: Preprocess
    memory: Mapping[str, Pixels] | None = None
    given: Mapping[str, Tensor] = field(default_factory=dict)
    decode: Decode | None = None
    with_label_maps: bool = False
    label_maps: dict[str, np.ndarray] = field(default_factory=dict)
    _pixels: dict[str, Pixels | str] = field(default_factory=dict)
    _content: dict[str, str] = field(default_factory=dict)

    def show_batch(
        self, pixels: Mapping[str, Pixels], given: Mapping[str, Tensor], label_maps: dict[str, np.ndarray]
    ) -> None:
        """Advance to the next batch of data in memory."""
        self.memory, self.given, self.label_maps = pixels, given, label_maps

    def load(self, job: StressJob) -> Inputs[Batch]:
        assert job.condition is not None
        suite = self.suites[job.condition.suite]
        views: list[np.ndarray] = []
        images: list[RunImage] = []
        unreadable: dict[str, str] = {}
        for image in job.run_images:
            try:
                views.append(suite.make(ImageView(image, self), job.condition))
                images.append(image)
            except ImageError as error:
                unreadable[image.name] = str(error)
        content = {image.name: self.content_of(image) for image in images}
        data = self._stacked(images, views) if images else None
        self._forget(REMEMBERED * max(1, len(job.run_images)))
        return Inputs(data, content, unreadable)

    def _stacked(self, images: list[RunImage], views: list[np.ndarray]) -> Batch:
        stacked = torch.from_numpy(np.stack(views)).permute(0, 1, 4, 2, 3).contiguous()
        maps = [self.label_maps[image.name] for image in images] if self.label_maps else None
        return Batch(tuple(images), stacked, None if maps is None else torch.from_numpy(np.stack(maps)))

    def readable(self, job: StressJob, image: str) -> bool:
        """Whether an image, and its mask where masks are used, can be read now."""
        run_image = next(one for one in job.run_images if one.name == image)
        try:
            view = ImageView(run_image, self)
            opened = view.opened()
            if self.decode is not None and run_image.reader is None:
                view.mask(opened.size)
        except ImageError:
            return False
        return True

    def content(self, job: StressJob, image: str) -> str:
        """The hash of an image's bytes as they are now."""
        self._content.pop(image, None)
        return self.content_of(next(one for one in job.run_images if one.name == image))

    def content_of(self, image: RunImage) -> str:
        known = self._content.get(image.name)
        if known is None:
            known = self._hash(image)
            self._content[image.name] = known
        return known

    def _hash(self, image: RunImage) -> str:
        if self.memory is not None:
            return bytes_hash(self.memory[image.name].tobytes())
        assert image.item is not None
        source = image.item.source
        if not isinstance(source, Path) or source.is_file():
            return source_hash(source)
        return bytes_hash(np.asarray(ImageView(image, self).opened()).tobytes())

    def pixels(self, image: RunImage) -> Pixels:
        """The image as the model sees it; the last ones are remembered, for the next condition."""
        if self.memory is not None:
            return self.memory[image.name]
        known = self._pixels.get(image.name)
        if known is None:
            try:
                known = self._read(image)
            except ImageError as error:
                known = str(error)
            self._pixels[image.name] = known
        if isinstance(known, str):
            raise ImageError(known)
        return known

    def _read(self, image: RunImage) -> Pixels:
        view = ImageView(image, self)
        opened = view.opened()
        fits = (opened.height, opened.width) == self.preprocess.size
        ready = image.reader is not None and image.reader.ready and fits
        pixels = np.ascontiguousarray(np.asarray(opened) if ready else self.preprocess.pixels(opened))
        if self.with_label_maps:
            self.label_maps[image.name] = self.preprocess.mask(view.mask(opened.size)).numpy()
        return pixels

    def _forget(self, keep: int) -> None:
        if self.memory is not None:
            return
        for name in list(self._pixels)[:-keep]:
            del self._pixels[name]
            self.label_maps.pop(name, None)


@dataclass(frozen=True)
class ImageView:
    """One image, as a suite's `make` sees it."""

    image: RunImage
    loader: ImageLoader

    @property
    def seed(self) -> int:
        """The seed of this image: the same in any order, batch and process."""
        return image_seed(self.loader.seed, self.image.name)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the model's input."""
        return self.loader.preprocess.size

    def pixels(self) -> Pixels:
        """As the model sees it: (H, W, 3), resized and cropped, not normalized."""
        return self.loader.pixels(self.image)

    def uncropped(self) -> Pixels:
        """Resized, but not yet cropped; of images in memory the same as `pixels`."""
        if self.loader.memory is not None:
            return self.pixels()
        return np.ascontiguousarray(self.loader.preprocess.pixels(self.opened(), crop=False))

    def opened(self) -> Image.Image:
        """The image file, as RGB."""
        assert self.image.item is not None
        if self.image.reader is not None:
            return self.image.reader.read(self.image.item)
        return read_image(self.image.item.source)

    def mask(self, size: tuple[int, int]) -> Image.Image:
        """Its mask, 255 object, 128 border, 0 rest. size: (width, height) of the image, which the mask must
        have."""
        assert self.image.item is not None and self.loader.decode is not None
        return read_mask(self.image.item, self.loader.decode, size)

    def as_model_sees(self, image: Image.Image) -> Pixels:
        """Another image, resized and cropped as the model's images are."""
        return self.loader.preprocess.pixels(image)


SAMPLES = 64  # images of a stream that are kept, to be stored with the run


@dataclass(frozen=True)
class ImageBatch:
    """Images that go through all conditions together.

    Attributes:
        pixels: By name, for data in memory: 8-bit pixels, the images as they were given, and label maps.
        given: See `pixels`.
        label_maps: See `pixels`.
    """

    images: tuple[RunImage, ...]
    pixels: dict[str, Pixels] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    label_maps: dict[str, np.ndarray] = field(default_factory=dict)


# -- folders ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderData:
    """The labeled images of a folder; for a segmenter, with label maps. folder None: no images."""

    folder: Path | None
    labeled: Labeled
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
            return cls(None, Labeled([]), batch_size)
        if not label_maps:
            lookup = Classes(loaded.class_names, classes) if labels_used else Unlabeled()
            labeled = find(folder, masks, lookup, limit)
        else:
            labeled = find_maps(folder, masks, limit=limit)
            if labeled.classes != classes:
                raise InputError(
                    f"segmentation: {loaded.name} has {classes} classes, the masks of {folder} "
                    f"({labeled.layout}) have {labeled.classes}"
                )
        _check_labels(labeled, loaded.name)
        return cls(folder, labeled, batch_size)

    @property
    def count(self) -> int:
        return len(self.labeled.items)

    @property
    def decode(self) -> Decode | None:
        return self.labeled.decode

    @property
    def images(self) -> list[RunImage]:
        return [RunImage.of(item) for item in self.labeled.items]

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
            "images": len(lines) or None,
            "images_hash": names_hash(lines) if lines else None,
            "layout": self.labeled.layout,
        }
        if isinstance(self.labeled, Segmented):
            facts["segments"] = list(self.labeled.names or range(self.labeled.classes))
        return facts

    def notes(self) -> Iterator[str]:
        """What is missing or left out."""
        empty = self._empty_folders()
        if self.folder is not None and empty:
            yield (
                f"{len(empty)} class folders of {self.folder.name} have no image (incomplete download?): "
                f"{abbreviated(empty)}"
            )
        if self.labeled.without:
            yield f"{self.labeled.without} images have no mask and are left out"

    def _empty_folders(self) -> list[str]:
        if self.folder is None or self.labeled.layout not in ("class folders", "pairs"):
            return []
        return [name for name in subfolders(self.folder) if not any(below(self.folder / name))]


def _check_labels(labeled: Labeled, model: str) -> None:
    counts = Counter(item.name for item in labeled.items)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is listed twice: every image of a run counts once")
    unknown = next((item.name for item in labeled.items if item.label is None), None)
    if unknown is not None:
        raise InputError(
            f"{unknown}: its class is not one of {model}'s. Every image needs a label that the model knows."
        )


# -- streams ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamData:
    """Labeled images of a stream; the first ones are kept, to be stored as samples of the run."""

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
            raise InputError(f"segmentation: expected a folder of images with label maps, got {spec}")
        lookup = Classes(loaded.class_names, classes) if labels_used else Unlabeled()
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

    def check_normalization(self, normalization: Normalization, model: str) -> list[str]:
        """A note on a normalization that is neither known nor seen in the images; a wrong one is an error."""
        images, statistics = self.first.images, (normalization.mean, normalization.std)
        pixels_of(images, *statistics)
        if check_levels(images, statistics) or normalization.known:
            return []
        note = (
            f"{model} does not declare how its images are normalized: ImageNet's mean and std are assumed. "
            "Give mean= and std= if they are others"
        )
        warnings.warn(note, stacklevel=5)
        return [note]

    def facts(self, normalization: Normalization, classes: int) -> dict[str, Any]:
        """What defines the numbers of the run."""
        levels = _gray_levels(self.first.images, normalization)
        facts: dict[str, Any] = {
            "images": None,
            "images_hash": tensor_hash(levels, self.first.labels),
            "data": "in memory",
            "limit": self.limit,
        }
        if self.label_maps:
            facts["segments"] = list(range(classes))
        return facts

    def batches(self, normalization: Normalization, classes: int) -> Iterator[ImageBatch]:
        """Every batch; each only once, since the data may be a generator."""
        for number, batch in enumerate(chain([self.first], self._batches)):
            self._check_range(batch.labels, classes, number)
            yield self._image_batch(batch, normalization)

    def _image_batch(self, batch: TensorBatch, normalization: Normalization) -> ImageBatch:
        classes = [0] * len(batch) if self.label_maps else batch.labels.tolist()
        levels = _gray_levels(batch.images, normalization).numpy()
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
            raise InputError(f"labels: expected classes 0..{classes - 1}, got {got} in batch {number}")


def _gray_levels(images: Tensor, normalization: Normalization) -> Tensor:
    """(B, H, W, 3) uint8, with the normalization undone."""
    pixels = pixels_of(images, normalization.mean, normalization.std)[0]
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
