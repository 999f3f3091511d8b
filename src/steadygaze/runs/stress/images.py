"""From image files (or pixels in memory) to what the model is shown: uint8, resized and cropped, before
normalisation. Runs in worker processes beside the model; a job is one batch of images under one condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from steadygaze.data.content import bytes_hash, source_hash
from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import Decode, read_mask
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import BadImage
from steadygaze.runs.loop import Inputs, Job
from steadygaze.seeding import image_seed

if TYPE_CHECKING:
    from steadygaze.runs.stress.suite import Condition, Suite

Pixels = UInt8[np.ndarray, "h w 3"]
REMEMBERED = 2  # batches of images that a worker keeps for the next condition


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
class MadeImages:
    """What a worker gives back: the images that could be read, their views (B, V, 3, H, W), and label maps
    where they are used."""

    images: tuple[RunImage, ...]
    views: UInt8[Tensor, "b v 3 h w"]
    label_maps: Tensor | None = None


@dataclass
class ImageLoader:
    """Makes the images of a job.

    memory: pixels by name, for data in memory; None: images are read from files
    given: by name, images in memory as they were given, normalised
    decode: how masks are read              with_label_maps: whether every image comes with a label map
    label_maps: by name; of images in memory all of them
    """

    seed: int
    suites: Mapping[str, Suite]
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

    def load(self, job: StressJob) -> Inputs[MadeImages]:
        assert job.condition is not None
        suite = self.suites[job.condition.suite]
        views: list[np.ndarray] = []
        images: list[RunImage] = []
        unreadable: dict[str, str] = {}
        for image in job.run_images:
            try:
                views.append(suite.make(ImageView(image, self), job.condition))
                images.append(image)
            except BadImage as error:
                unreadable[image.name] = str(error)
        content = {image.name: self.content_of(image) for image in images}
        data = self._stacked(images, views) if images else None
        self._forget(REMEMBERED * max(1, len(job.run_images)))
        return Inputs(data, content, unreadable)

    def _stacked(self, images: list[RunImage], views: list[np.ndarray]) -> MadeImages:
        stacked = torch.from_numpy(np.stack(views)).permute(0, 1, 4, 2, 3).contiguous()
        maps = [self.label_maps[image.name] for image in images] if self.label_maps else None
        return MadeImages(tuple(images), stacked, None if maps is None else torch.from_numpy(np.stack(maps)))

    def readable(self, job: StressJob, image: str) -> bool:
        """Whether an image, and its mask where masks are used, can be read now."""
        run_image = next(one for one in job.run_images if one.name == image)
        try:
            view = ImageView(run_image, self)
            opened = view.opened()
            if self.decode is not None and run_image.reader is None:
                view.mask(opened.size)
        except BadImage:
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
            except BadImage as error:
                known = str(error)
            self._pixels[image.name] = known
        if isinstance(known, str):
            raise BadImage(known)
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
        """As the model sees it: (H, W, 3), resized and cropped, not normalised."""
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
