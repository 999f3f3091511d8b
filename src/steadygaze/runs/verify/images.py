"""The images of a `verify` run as jobs of the loop: from a folder of files, or from batches in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from steadygaze.data.content import file_hash, tensor_hash
from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import BORDER, OBJECT, Labelled, geometry, read_mask
from steadygaze.errors import BadImage, BadInput
from steadygaze.faithfulness.metric import Batch
from steadygaze.loading.load import Loaded
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
        """Groups of jobs; each group is executed before the next is asked for."""
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


# -- folders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilesJob(Job):
    """A batch of image files."""

    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class FolderSource:
    """Labelled images of a folder, with masks if they are needed."""

    labelled: Labelled
    loaded: Loaded
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
        decode = self.labelled.decode
        mask = None if decode is None else self._mask_tensor(read_mask(item, decode, image.size))
        return self.loaded.preprocess(image), mask

    def _mask_tensor(self, mask: Image.Image) -> Tensor:
        seen = geometry(self.loaded.source, self.loaded.recipe)(mask)
        values = torch.frombuffer(bytearray(seen.tobytes()), dtype=torch.uint8)
        return values.view(seen.height, seen.width)

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


# -- batches in memory -------------------------------------------------------------------------------------------------

Given = tuple[Tensor, Tensor, Tensor | None]  # images, labels, masks


@dataclass(frozen=True)
class TensorsJob(Job):
    """A batch in memory."""

    tensors: Given | None = field(default=None, repr=False)


@dataclass
class MemorySource:
    """Batches (images, labels) or (images, labels, masks), read as they come; images are called "0", "1", ..."""

    data: Iterable[Any]
    normalisation: Normalisation
    dtype: torch.dtype
    needs_masks: Sequence[str] = ()
    limit: int | None = None

    @property
    def count(self) -> None:
        return None

    @cached_property
    def _batches(self) -> Iterator[Given]:
        return checked_batches(self.data, self.needs_masks, self.limit)

    @cached_property
    def first(self) -> Given:
        """The first batch, which identifies the data in the settings of a run."""
        return next(self._batches)

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Sequence[TensorsJob]]:
        before = 0
        tensors: Given | None = self.first
        del self.first  # each batch is freed when the next one is read
        while tensors is not None:
            names = tuple(str(before + i) for i in range(len(tensors[0])))
            before += len(names)
            yield [TensorsJob(names, keys, tensors=tensors)]
            tensors = next(self._batches, None)

    def position(self, image: str) -> int:
        return int(image)

    def load(self, job: TensorsJob) -> Inputs[Batch]:
        assert job.tensors is not None
        images, labels, masks = job.tensors
        mean, std = self.normalisation.mean, self.normalisation.std
        batch = Batch(
            images.to(self.dtype) if images.is_floating_point() else images,  # integers are refused further on
            labels,
            masks,
            torch.tensor(mean, dtype=torch.float32),
            torch.tensor(std, dtype=torch.float32),
            job.images,
        )
        return Inputs(batch, {name: tensor_hash(image) for name, image in zip(job.images, images, strict=True)})

    def readable(self, job: TensorsJob, image: str) -> bool:
        return True

    def content(self, job: TensorsJob, image: str) -> str:
        assert job.tensors is not None
        return tensor_hash(job.tensors[0][job.images.index(image)])

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        if iter(self.data) is self.data:  # an iterator that is used up
            return
        wanted, before, kept = set(map(int, images)), 0, {}
        for given in checked_batches(self.data, self.needs_masks, self.limit):
            for i in range(len(given[0])):
                if before + i in wanted:
                    parts = tuple(None if x is None else x[i : i + 1] for x in given)
                    kept[str(before + i)] = TensorsJob((str(before + i),), (), tensors=parts)  # type: ignore[arg-type]
            before += len(given[0])
            if len(kept) == len(wanted):
                break
        for image in images:
            batch = self.load(kept[image]).data if image in kept else None
            if batch is not None:
                yield batch


def checked_batches(
    data: Iterable[Any], needs_masks: Sequence[str] = (), limit: int | None = None
) -> Iterator[Given]:
    """The batches of `data`, checked, at most `limit` images; at least one batch, or an error."""
    before = 0
    for number, given in enumerate(data):
        if limit is not None and before >= limit:
            return
        images, labels, *rest = _as_tensors(given, number)
        if images.dim() != 4:
            raise BadInput(
                f"images: expected (B, 3, H, W), got {tuple(images.shape)} as batch {number}. A torch DataLoader makes "
                "batches."
            )
        if labels.is_floating_point() or labels.dim() != 1 or len(labels) != len(images):
            raise BadInput(
                f"labels: expected {len(images)} integers, got {labels.dtype} of shape {tuple(labels.shape)} in batch "
                f"{number}"
            )
        masks = _as_masks(rest[0], images, number) if rest else None
        if masks is None and needs_masks:
            raise BadInput(
                f"{', '.join(needs_masks)}: expected masks, but batch {number} has none. Give (images, labels, masks)."
            )
        kept = slice(None if limit is None else limit - before)
        before += len(images[kept])
        yield images[kept], labels.long()[kept], None if masks is None else masks[kept]
    if before == 0:
        raise BadInput("data: expected at least one batch, got none (an exhausted iterator?)")


def _as_tensors(given: Any, number: int) -> list[Tensor]:
    kinds = [type(x).__name__ for x in given] if isinstance(given, (tuple, list)) else type(given).__name__
    message = (
        "data: expected batches (images, labels) or (images, labels, masks) of tensors, got "
        f"{kinds} as batch {number}."
    )
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise BadInput(f"{message} Put a single batch into a list: [(images, labels)].")
    try:
        return [x if isinstance(x, Tensor) else torch.as_tensor(x) for x in given]
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(message) from error


def _as_masks(masks: Tensor, images: Tensor, number: int) -> Tensor:
    if masks.dim() == 4 and masks.shape[1] == 1:
        masks = masks[:, 0]
    if tuple(masks.shape) != (len(images), *images.shape[-2:]):
        raise BadInput(
            f"masks: expected {(len(images), *images.shape[-2:])}, the size of the images, got {tuple(masks.shape)} in "
            f"batch {number}"
        )
    values = set(masks.unique().tolist())
    if values <= {0, 1}:
        return masks.to(torch.uint8) * OBJECT
    if not values <= {0, BORDER, OBJECT}:
        raise BadInput(
            f"masks: expected 255 (object), 128 (border) and 0, or 1 and 0; got {sorted(values)[:8]} in batch {number}"
        )
    return masks.to(torch.uint8)
