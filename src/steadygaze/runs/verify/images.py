"""The images of a `verify` run as jobs of the loop: from a folder of files, or from batches in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from steadygaze.data.content import file_hash, tensor_hash
from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import Labelled, read_mask
from steadygaze.data.sources import InMemoryData, TensorBatch
from steadygaze.errors import BadImage
from steadygaze.faithfulness.inputs import Batch
from steadygaze.loading.loaded import LoadedModel
from steadygaze.runs.loop import Inputs, Job
from steadygaze.runs.normalisation import Normalisation
from steadygaze.runs.rows import RowKey


class ImageSource(Protocol):
    """Where the images of a run come from; also the `Loader` of its jobs."""

    @property
    def count(self) -> int | None:
        """The number of images; None if unknown."""
        ...

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Sequence[Any]]:
        """Groups of jobs; each group is executed before the next is made."""
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


# -- folders
# -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilesJob(Job):
    """A batch of image files."""

    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class FolderSource:
    """Labelled images of a folder, with masks if they are needed."""

    labelled: Labelled
    loaded: LoadedModel
    batch_size: int

    @property
    def count(self) -> int:
        return len(self.labelled.items)

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Sequence[FilesJob]]:
        items, size = self.labelled.items, self.batch_size
        batches = [tuple(items[start : start + size]) for start in range(0, len(items), size)]
        yield [
            FilesJob(tuple(item.name for item in batch), keys, batch=number, items=batch)
            for number, batch in enumerate(batches)
        ]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {item.name: position for position, item in enumerate(self.labelled.items)}

    def position(self, image: str) -> int:
        return self._positions[image]

    def load(self, job: FilesJob) -> Inputs[Batch]:
        return self._load(job.items)

    def _load(self, items: Sequence[Item]) -> Inputs[Batch]:
        read: dict[Item, tuple[Tensor, Tensor | None]] = {}
        content: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        for item in items:
            try:
                read[item] = self._read(item)
                content[item.name] = file_hash(item.path)
            except BadImage as error:
                read.pop(item, None)
                unreadable[item.name] = str(error)
        if not read:
            return Inputs(None, content, unreadable)
        masks = [mask for _, mask in read.values() if mask is not None]
        batch = Batch(
            torch.stack([image for image, _ in read.values()]),
            torch.tensor([-1 if item.label is None else item.label for item in read]),
            torch.stack(masks) if masks else None,
            torch.tensor(self.loaded.mean, dtype=torch.float32),
            torch.tensor(self.loaded.std, dtype=torch.float32),
            tuple(item.name for item in read),
        )
        return Inputs(batch, content, unreadable)

    def _read(self, item: Item) -> tuple[Tensor, Tensor | None]:
        image = read_image(item.path)
        preprocess, decode = self.loaded.preprocess, self.labelled.decode
        mask = None if decode is None else preprocess.mask(read_mask(item, decode, image.size))
        return preprocess(image), mask

    def readable(self, job: FilesJob, image: str) -> bool:
        try:
            self._read(self.labelled.items[self.position(image)])
        except BadImage:
            return False
        return True

    def content(self, job: FilesJob, image: str) -> str:
        return file_hash(self.labelled.items[self.position(image)].path)

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        for image in images:
            batch = self._load([self.labelled.items[self.position(image)]]).data
            if batch is not None:
                yield batch


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
