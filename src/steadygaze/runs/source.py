"""The images of a run: where they come from, how they are read, and the jobs that they form.

    Source (files or memory) -> batches of RunImage -> Job -> ImageLoader -> what the model is shown

`verify` shows the model its images once, `stress` under many conditions: a job is one batch of images, there
under one condition. Loaders work in threads or processes beside the model.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from steadygaze.data.datasets.tree import abbreviated, subfolders
from steadygaze.data.folders import ClassLookup, Item
from steadygaze.data.images import (
    bytes_hash,
    images_below,
    names_hash,
    read_image,
    source_hash,
    tensor_hash,
)
from steadygaze.data.label_maps import IGNORED, SegmentationImages, find_label_maps
from steadygaze.data.masks import Decode, LabeledImages, find_labeled_images, read_mask
from steadygaze.data.memory import InMemoryData, TensorBatch
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.data.streams import ImageStream, open_stream, read_ahead
from steadygaze.errors import ImageError, InputError
from steadygaze.robustness.attacks import pixels_of
from steadygaze.runs.jobs import Inputs, Job, RunImage
from steadygaze.runs.prepare import Normalization, check_levels
from steadygaze.runs.request import Request
from steadygaze.runs.settings import Condition, Views
from steadygaze.runs.shards import World
from steadygaze.seeding import image_seed

Pixels = UInt8[np.ndarray, "h w 3"]
T = TypeVar("T")
REMEMBERED = 2  # batches of images that a worker keeps for the next condition
SAMPLES = 64  # images of a stream that are kept, to be stored with the run


# -- loaders ---------------------------------------------------------------------------------------


@dataclass
class ImageLoader(Generic[T]):
    """Reads the images of a job. It is pickled for worker processes where a platform has no fork.

    Attributes:
        preprocess: Of the model; of images in memory their size, mean and std.
        decode: How masks and label maps are read; None without them.
    """

    preprocess: Preprocess
    decode: Decode | None = None

    def load(self, job: Job) -> Inputs[T]:
        """The images of a job, ready for the model."""
        raise NotImplementedError

    def opened(self, image: RunImage) -> Image.Image:
        """The image file, as RGB."""
        assert image.item is not None
        return read_image(image.item.source) if image.reader is None else image.reader.read(image.item)

    def mask(self, image: RunImage, size: tuple[int, int]) -> Image.Image:
        """Its mask: 255 object, 128 border, 0 rest. size: (width, height) that the mask must have."""
        assert image.item is not None and self.decode is not None
        return read_mask(image.item, self.decode, size)

    def readable(self, job: Job, name: str) -> bool:
        """Whether an image that could not be read in an earlier run can be read now, with its mask."""
        image = job.image(name)
        try:
            if image.tensor is None:
                opened = self.opened(image)
                if self.decode is not None and image.reader is None:
                    self.mask(image, opened.size)
        except ImageError:
            return False
        return True

    def content(self, job: Job, name: str) -> str:
        """The content hash of an image as it is now; may raise `ImageError`."""
        return self.hash(job.image(name))

    def hash(self, image: RunImage) -> str:
        """The content hash of an image."""
        if image.tensor is not None:
            return tensor_hash(image.tensor)
        assert image.item is not None
        source = image.item.source
        if not isinstance(source, Path) or source.is_file():
            return source_hash(source)
        return bytes_hash(np.asarray(self.opened(image)).tobytes())


class ViewMaker(Protocol):
    """The part of a suite that runs in worker processes."""

    def make(self, image: ImageView, condition: Condition) -> Views:
        """The views that the condition makes of one image."""
        ...


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
class ViewLoader(ImageLoader[Batch]):
    """Makes the views of a job by its suite: 8-bit, resized and cropped, before normalization.

    Attributes:
        seed: Of the run.
        suites: By name.
        with_label_maps: Whether every image comes with a label map.
    """

    seed: int = 0
    suites: Mapping[str, ViewMaker] = field(default_factory=dict)
    with_label_maps: bool = False
    _pixels: dict[str, Pixels | str] = field(default_factory=dict)  # or why it cannot be read
    _label_maps: dict[str, np.ndarray] = field(default_factory=dict)
    _content: dict[str, str] = field(default_factory=dict)

    def load(self, job: Job) -> Inputs[Batch]:
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
        for image in images:
            if image.name not in self._content:
                self._content[image.name] = self.hash(image)
        content = {image.name: self._content[image.name] for image in images}
        batch = None
        if images:
            stacked = torch.from_numpy(np.stack(views)).permute(0, 1, 4, 2, 3).contiguous()
            maps = [self._label_maps[image.name] for image in images] if self.with_label_maps else None
            batch = Batch(tuple(images), stacked, None if maps is None else torch.from_numpy(np.stack(maps)))
        for name in list(self._pixels)[: -REMEMBERED * max(1, len(job.run_images))]:
            del self._pixels[name]
            self._label_maps.pop(name, None)
        return Inputs(batch, content, unreadable)

    def hash(self, image: RunImage) -> str:
        return super().hash(image) if image.tensor is None else bytes_hash(self.pixels(image).tobytes())

    def pixels(self, image: RunImage) -> Pixels:
        """The image as the model sees it; the last ones are remembered, for the next condition."""
        pixels = self._pixels.get(image.name)
        if pixels is None:
            try:
                pixels = self._read(image) if image.tensor is None else self._levels(image, image.tensor)
            except ImageError as error:
                pixels = str(error)
            self._pixels[image.name] = pixels
        if isinstance(pixels, str):
            raise ImageError(pixels)
        return pixels

    def _read(self, image: RunImage) -> Pixels:
        opened = self.opened(image)
        fits = (opened.height, opened.width) == self.preprocess.size
        ready = image.reader is not None and image.reader.ready and fits
        pixels = np.ascontiguousarray(np.asarray(opened) if ready else self.preprocess.pixels(opened))
        if self.with_label_maps:
            self._label_maps[image.name] = self.preprocess.mask(self.mask(image, opened.size)).numpy()
        return pixels

    def _levels(self, image: RunImage, tensor: Tensor) -> Pixels:
        if self.with_label_maps and image.mask is not None:
            self._label_maps[image.name] = image.mask.cpu().numpy()
        return gray_levels(tensor[None], self.preprocess.mean, self.preprocess.std)[0].numpy()


@dataclass(frozen=True)
class ImageView:
    """One image, as a suite's `make` sees it."""

    image: RunImage
    loader: ViewLoader

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
        if self.image.tensor is not None:
            return self.pixels()
        return np.ascontiguousarray(self.loader.preprocess.pixels(self.opened(), crop=False))

    def opened(self) -> Image.Image:
        """The image file, as RGB."""
        return self.loader.opened(self.image)

    def mask(self, size: tuple[int, int]) -> Image.Image:
        """Its mask: 255 object, 128 border, 0 rest. size: (width, height) that the mask must have."""
        return self.loader.mask(self.image, size)

    def as_model_sees(self, image: Image.Image) -> Pixels:
        """Another image, resized and cropped as the model's images are."""
        return self.loader.preprocess.pixels(image)


def gray_levels(
    images: Float[Tensor, "b 3 h w"], mean: Sequence[float], std: Sequence[float]
) -> UInt8[Tensor, "b h w 3"]:
    """8-bit images, with the normalization undone."""
    pixels = pixels_of(images, mean, std)[0]
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


# -- sources ---------------------------------------------------------------------------------------

Batches = Iterable[tuple[int, tuple[RunImage, ...]]]  # with their numbers


@dataclass(frozen=True)
class FileSource:
    """Labeled images of a folder or a stream; for a segmenter, with label maps.

    Attributes:
        folder: Of the images; None for a stream, or without data.
        first_images: Of a stream, kept as they come, to be stored as samples of the run.
    """

    images: LabeledImages | ImageStream
    batch_size: int
    folder: Path | None = None
    first_images: list[RunImage] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        request: Request,
        place: Path | StreamSpec | None,
        lookup: ClassLookup,
        *,
        labels_needed: bool,
        label_maps: bool = False,
        groups: Sequence[str] = (),
    ) -> FileSource:
        """Find the images. place: None for no images; label_maps: of a segmenter; groups: columns."""
        if place is None:
            return cls(LabeledImages([]), request.batch_size)
        if isinstance(place, StreamSpec):
            request.refuse_masks(place)
            if label_maps:
                raise InputError(f"segmentation: expected a folder of images with label maps, got {place}")
            stream = open_stream(
                place, lookup, labels_needed=labels_needed, limit=request.limit, groups=groups
            )
            return cls(stream, request.batch_size)
        images = (
            find_label_maps(place, request.masks, limit=request.limit)
            if label_maps
            else find_labeled_images(place, request.masks, lookup, request.limit, groups)
        )
        return cls(images, request.batch_size, place)

    @cached_property
    def count(self) -> int | None:
        """Number of images; None if it is not known before they are read."""
        return self.images.count()

    @property
    def is_stream(self) -> bool:
        return isinstance(self.images, ImageStream)

    @property
    def damaged(self) -> list[str]:
        """What could not be read whole, with reasons: shards of a stream."""
        return self.images.damaged if isinstance(self.images, ImageStream) else []

    @property
    def decode(self) -> Decode | None:
        return self.images.decode

    @property
    def images_without_mask(self) -> int:
        """Number of images that are left out because they have no mask."""
        return 0 if isinstance(self.images, ImageStream) else self.images.without

    @property
    def unlabeled(self) -> str | None:
        """The first image of a folder whose class is not one of the model's."""
        if isinstance(self.images, ImageStream):
            return None
        return next((item.name for item in self.images if item.label is None), None)

    def check_labels(self, model: str) -> None:
        """InputError unless every image of a folder is there once, with a label."""
        if isinstance(self.images, ImageStream):
            return
        twice = next((n for n, times in Counter(i.name for i in self.images).items() if times > 1), None)
        if twice is not None:
            raise InputError(f"{twice} is listed twice: every image of a run counts once")
        if self.unlabeled is not None:
            raise InputError(
                f"{self.unlabeled}: its class is not one of {model}'s. Every image needs a label that the "
                "model knows."
            )

    def labels(self, classes: int) -> list[int]:
        """The classes that occur; of a stream all of them, since they are not known before it is read."""
        if isinstance(self.images, ImageStream):
            return list(range(classes))
        return sorted({item.label for item in self.images if item.label is not None})

    def groups(self) -> Iterator[Batches]:
        """All batches of a folder, or those of a stream as they come."""
        yield self._streamed() if self.is_stream else list(self._numbered(iter(self.images)))

    def _streamed(self) -> Iterator[tuple[int, tuple[RunImage, ...]]]:
        assert isinstance(self.images, ImageStream)
        self.first_images.clear()
        for number, batch in self._numbered(read_ahead(self.images)):
            self.first_images.extend(batch[: SAMPLES - len(self.first_images)])
            yield number, batch

    def _numbered(self, items: Iterator[Item]) -> Iterator[tuple[int, tuple[RunImage, ...]]]:
        batches = iter(lambda: tuple(map(RunImage.of, islice(items, self.batch_size))), ())
        return enumerate(batches)

    def owned(self, world: World) -> int | None:
        """How many images belong to this process; None if the number is unknown."""
        if self.count is None:
            return None
        starts = enumerate(range(0, self.count, self.batch_size))
        return sum(min(self.batch_size, self.count - start) for n, start in starts if world.owns(n))

    def position(self, image: str) -> int:
        return self.images.position(image)

    def find(self, names: Sequence[str]) -> Iterator[RunImage]:
        """These images, again."""
        return map(RunImage.of, self.images.find(names))

    def facts(self, *, masks: bool = False) -> dict[str, Any]:
        """What identifies the images in the settings of a run. masks: tell which of them have masks."""
        if isinstance(self.images, ImageStream):
            return self.images.facts(self.images.first())
        items = self.images.items
        if masks:
            lines = [f"{item.name}\t{item.label}\t{item.mask is not None}" for item in items]
        else:
            lines = [f"{image.name}\t{image.labels}" for image in map(RunImage.of, items)]
        facts: dict[str, Any] = {
            "images": len(lines) or None,
            "images_hash": names_hash(lines) if lines else None,
            "layout": self.images.layout,
        }
        if isinstance(self.images, SegmentationImages):
            facts["segments"] = list(self.images.names or range(self.images.classes))
        return facts

    def group_facts(self) -> dict[str, Any]:
        """What identifies the groups of the images of a folder; those of a stream are not known before."""
        if isinstance(self.images, ImageStream):
            return {}
        return {"hash": names_hash(f"{item.name}\t{item.group}" for item in self.images)}

    def notes(self) -> Iterator[str]:
        """What is missing or left out."""
        if isinstance(self.images, ImageStream):
            return
        folder = self.folder if self.images.layout in ("class folders", "pairs") else None
        if folder is not None:
            empty = [name for name in subfolders(folder) if not any(images_below(folder / name))]
            if empty:
                yield (
                    f"{len(empty)} class folders of {folder.name} have no image (incomplete download?): "
                    f"{abbreviated(empty)}"
                )
        if self.images_without_mask:
            yield f"{self.images_without_mask} images have no mask and are left out"


@dataclass
class MemorySource:
    """Batches in memory (see `data.memory`), read as they come; images are called "0", "1", ... in order.

    Attributes:
        classes: Labels must be below; None: they are not checked.
    """

    data: InMemoryData
    normalization: Normalization
    classes: int | None = None

    damaged: ClassVar[list[str]] = []
    decode: ClassVar[Decode | None] = None
    is_stream: ClassVar[bool] = False
    images_without_mask: ClassVar[int] = 0

    @property
    def count(self) -> int | None:
        return self.data.count

    @cached_property
    def _batches(self) -> Iterator[TensorBatch]:
        return iter(self.data)

    @cached_property
    def first(self) -> TensorBatch:
        """The first batch, which identifies the data in the settings of a run."""
        return next(self._batches)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images."""
        height, width = self.first.images.shape[2:]
        return height, width

    def groups(self) -> Iterator[Batches]:
        """Batch by batch; each only once, since the data may be a generator."""
        batch: TensorBatch | None = self.first
        del self.first  # each batch is freed when the next one is read
        for number in count():
            if batch is None:
                return
            self._check_labels(batch.labels, number)
            yield [(number, tuple(self._images(batch)))]
            batch = next(self._batches, None)

    def _images(self, batch: TensorBatch) -> Iterator[RunImage]:
        for index, name in enumerate(batch.names):
            labels, mask = batch.labels[index], None if batch.masks is None else batch.masks[index]
            if self.data.label_maps:
                labels, mask = torch.tensor(0), labels
            yield RunImage(name, (int(labels),), tensor=batch.images[index], mask=mask)

    def _check_labels(self, labels: Tensor, number: int) -> None:
        if self.classes is None:
            return
        stated = labels[labels != IGNORED] if self.data.label_maps else labels
        if stated.numel() and (int(stated.min()) < 0 or int(stated.max()) >= self.classes):
            got = f"{int(stated.min())}..{int(stated.max())}"
            raise InputError(f"labels: expected classes 0..{self.classes - 1}, got {got} in batch {number}")

    def owned(self, world: World) -> int | None:
        return None if world.shard else self.count

    def position(self, image: str) -> int:
        return int(image)

    def find(self, names: Sequence[str]) -> Iterator[RunImage]:
        """These images, again; none of data that can be read only once."""
        if not self.data.rereadable:
            return
        wanted = set(names)
        found: dict[str, RunImage] = {}
        for batch in self.data:
            found |= {image.name: image for image in self._images(batch) if image.name in wanted}
            if len(found) == len(wanted):
                break
        yield from (found[name] for name in names if name in found)

    def check_normalization(self, model: str) -> list[str]:
        """A note on a normalization that is neither known nor seen in the images; a wrong one is an error."""
        statistics = self.normalization.mean, self.normalization.std
        pixels_of(self.first.images, *statistics)
        if check_levels(self.first.images, statistics) or self.normalization.known:
            return []
        note = (
            f"{model} does not declare how its images are normalized: ImageNet's mean and std are assumed. "
            "Give mean= and std= if they are others"
        )
        warnings.warn(note, stacklevel=5)
        return [note]


Source = FileSource | MemorySource
