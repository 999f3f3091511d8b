"""The images of a `verify` run as jobs of the loop: files of a folder or a stream, or batches in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from steadygaze.data.content import names_hash, source_hash, tensor_hash
from steadygaze.data.folders import ClassLookup, Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import LabelledImages, find_labelled_images, read_mask
from steadygaze.data.sources import InMemoryData, TensorBatch
from steadygaze.data.streams import ImageStream, StreamSpec, open_stream
from steadygaze.data.streams.stream import read_ahead
from steadygaze.errors import BadImage, BadInput
from steadygaze.faithfulness.inputs import Batch
from steadygaze.loading.loaded import LoadedModel
from steadygaze.runs.loop import Inputs, Job, owned_images
from steadygaze.runs.normalisation import Normalisation
from steadygaze.runs.processes import World
from steadygaze.runs.request import Request
from steadygaze.runs.rows import RowKey


class ImageSource(Protocol):
    """Where the images of a run come from; also the `Loader` of its jobs."""

    @property
    def count(self) -> int | None:
        """The number of images; None if unknown."""
        ...

    def work(self, world: World) -> int | None:
        """The number of images that this process computes; None if unknown."""
        ...

    @property
    def damaged(self) -> list[str]:
        """What could not be read whole, with reasons: shards of a stream."""
        ...

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Iterable[Any]]:
        """Groups of jobs; each group is executed before the next is made. A group that is an iterator is
        read as it is executed.
        """
        ...

    def position(self, image: str) -> int:
        """The position of an image in the data, by name."""
        ...

    def load(self, job: Any) -> Inputs[Batch]: ...

    def readable(self, job: Any, image: str) -> bool: ...

    def content(self, job: Any, image: str) -> str: ...

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        """These images once more, each as a batch of one; nothing if the data cannot be read twice."""
        ...


# -- files
# -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilesJob(Job):
    """A batch of image files."""

    items: tuple[Item, ...] = ()

    def item(self, image: str) -> Item:
        """The file of an image."""
        return self.items[self.images.index(image)]


@dataclass(frozen=True)
class FilesSource:
    """Labelled images of a folder or a stream, with masks if they are needed."""

    images: LabelledImages | ImageStream
    loaded: LoadedModel
    batch_size: int

    @cached_property
    def count(self) -> int | None:
        return self.images.count()

    def work(self, world: World) -> int | None:
        return owned_images(self.count, self.batch_size, world)

    @property
    def damaged(self) -> list[str]:
        return self.images.damaged if isinstance(self.images, ImageStream) else []

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Iterable[FilesJob]]:
        if isinstance(self.images, ImageStream):
            yield self._jobs(read_ahead(self.images), keys)
        else:
            yield list(self._jobs(iter(self.images), keys))

    def _jobs(self, items: Iterator[Item], keys: tuple[RowKey, ...]) -> Iterator[FilesJob]:
        batches = iter(lambda: tuple(islice(items, self.batch_size)), ())
        for number, batch in enumerate(batches):
            yield FilesJob(tuple(item.name for item in batch), keys, batch=number, items=batch)

    def position(self, image: str) -> int:
        return self.images.position(image)

    def load(self, job: FilesJob) -> Inputs[Batch]:
        return self._load(job.items)

    def _load(self, items: Sequence[Item]) -> Inputs[Batch]:
        read: dict[str, tuple[Item, Tensor, Tensor | None]] = {}
        content: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        for item in items:
            try:
                content[item.name] = source_hash(item.source)
                read[item.name] = (item, *self._read(item))
            except BadImage as error:
                content.pop(item.name, None)
                unreadable[item.name] = str(error)
        if not read:
            return Inputs(None, content, unreadable)
        masks = [mask for _, _, mask in read.values() if mask is not None]
        batch = Batch(
            torch.stack([image for _, image, _ in read.values()]),
            torch.tensor([-1 if item.label is None else item.label for item, _, _ in read.values()]),
            torch.stack(masks) if masks else None,
            torch.tensor(self.loaded.mean, dtype=torch.float32),
            torch.tensor(self.loaded.std, dtype=torch.float32),
            tuple(read),
        )
        return Inputs(batch, content, unreadable)

    def _read(self, item: Item) -> tuple[Tensor, Tensor | None]:
        image = read_image(item.source)
        preprocess, decode = self.loaded.preprocess, self.images.decode
        mask = None if decode is None else preprocess.mask(read_mask(item, decode, image.size))
        return preprocess(image), mask

    def readable(self, job: FilesJob, image: str) -> bool:
        try:
            self._read(job.item(image))
        except BadImage:
            return False
        return True

    def content(self, job: FilesJob, image: str) -> str:
        return source_hash(job.item(image).source)

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        for item in self.images.find(images):
            batch = self._load([item]).data
            if batch is not None:
                yield batch


def open_images(
    request: Request, place: Path | StreamSpec, lookup: ClassLookup, *, labels_needed: bool
) -> tuple[LabelledImages | ImageStream, dict[str, Any]]:
    """The images, and what identifies them in the settings of the run."""
    if isinstance(place, StreamSpec):
        request.refuse_masks(place)
        stream = open_stream(place, lookup, labels_needed=labels_needed, limit=request.limit)
        return stream, stream.facts(stream.first())
    images = find_labelled_images(place, request.masks, lookup, request.limit)
    unlabelled = next((item.name for item in images.items if item.label is None), None)
    if labels_needed and unlabelled is not None:
        raise BadInput(
            f"{unlabelled}: its class is not one of the model's. Explain the predicted class instead: "
            "target='predicted'"
        )
    lines = (f"{item.name}\t{item.label}\t{item.mask is not None}" for item in images.items)
    facts = {"pictures": len(images.items), "pictures_hash": names_hash(lines), "layout": images.layout}
    return images, facts


# -- batches in memory
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorsJob(Job):
    """A batch in memory."""

    tensors: TensorBatch | None = field(default=None, repr=False)


@dataclass
class MemorySource:
    """Data in memory, read as it comes."""

    data: InMemoryData
    normalisation: Normalisation
    dtype: torch.dtype

    @property
    def count(self) -> int | None:
        return self.data.count

    damaged: ClassVar[list[str]] = []

    def work(self, world: World) -> int | None:
        return None if world.shard else self.count

    @cached_property
    def _batches(self) -> Iterator[TensorBatch]:
        return iter(self.data)

    @cached_property
    def first(self) -> TensorBatch:
        """The first batch, which identifies the data in the settings of a run."""
        return next(self._batches)

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Sequence[TensorsJob]]:
        batch: TensorBatch | None = self.first
        del self.first  # each batch is freed when the next one is read
        for number in count():
            if batch is None:
                return
            yield [TensorsJob(batch.names, keys, batch=number, tensors=batch)]
            batch = next(self._batches, None)

    def position(self, image: str) -> int:
        return int(image)

    def load(self, job: TensorsJob) -> Inputs[Batch]:
        assert job.tensors is not None
        hashes = (tensor_hash(image) for image in job.tensors.images)
        return Inputs(self._batch(job.tensors), dict(zip(job.images, hashes, strict=True)))

    def _batch(self, tensors: TensorBatch) -> Batch:
        return Batch(
            tensors.images.to(self.dtype),
            tensors.labels,
            tensors.masks,
            torch.tensor(self.normalisation.mean, dtype=torch.float32),
            torch.tensor(self.normalisation.std, dtype=torch.float32),
            tensors.names,
        )

    def readable(self, job: TensorsJob, image: str) -> bool:
        return True

    def content(self, job: TensorsJob, image: str) -> str:
        assert job.tensors is not None
        return tensor_hash(job.tensors.images[job.images.index(image)])

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        if not self.data.rereadable:
            return
        kept: dict[str, Batch] = {}
        for batch in self.data:
            for i in (i for i, name in enumerate(batch.names) if name in images):
                kept[batch.names[i]] = self._batch(batch[i : i + 1])
            if len(kept) == len(images):
                break
        yield from (kept[image] for image in images if image in kept)
