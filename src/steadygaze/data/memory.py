"""The `data` argument of `verify`, `stress` and others, in memory: batches, a `Dataset` or a `DataLoader`.

| data | what it holds |
| --- | --- |
| a folder (str or Path) | image files; see `folders` and `masks` |
| `wds:...`, `hf:...` (str) | a stream of image files; see `streams` |
| an iterable of batches, a `DataLoader` | (images, labels) or (images, labels, masks), each of B |
| a torch `Dataset` | (image, label) or (image, label, mask), one for each index; stacked to batches here |

Images are floating point, preprocessed as the model takes them, (B, 3, H, W). A `Dataset` may also give PIL
images, which are then preprocessed here. Labels are integers (B,), and for segmentation label maps (B, H,
W) with 255 where no class counts. Masks are (B, H, W) or (B, 1, H, W): 255 object, 128 border, 0
background, or bool. Each of them may be a tensor, a numpy array or a list. Images are named by their
position: "0", "1", ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from steadygaze.data.decoding import to_rgb
from steadygaze.data.masks import BORDER, OBJECT
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.errors import InputError

Data = str | Path | StreamSpec | Iterable[Any] | Dataset[Any]


@dataclass(frozen=True, eq=False)
class TensorBatch:
    """Images as the model takes them, with their names, labels (or label maps) and masks."""

    names: tuple[str, ...]
    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, "b *hw"]
    masks: UInt8[Tensor, "b h w"] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, part: slice) -> TensorBatch:
        masks = None if self.masks is None else self.masks[part]
        return TensorBatch(self.names[part], self.images[part], self.labels[part], masks)


def is_folder(data: Any) -> bool:
    """Whether `data` names a folder, existing or not, or a stream: images that are read from files."""
    return isinstance(data, (str, Path, StreamSpec))


@dataclass(frozen=True, eq=False)
class InMemoryData:
    """Data that is given as batches, a `Dataset` or a `DataLoader`: an iterable of checked `TensorBatch`es.

    Attributes:
        batch_size: Size of batches of a `Dataset`; batches that are given keep their size.
        limit: At most this many images.
        masks_for: Names of metrics that need masks; a batch without masks is then an error.
        label_maps: Labels are (B, H, W), for segmentation.
        preprocess: Preprocessing for a `Dataset` of PIL images.
        labels_used: False accepts labels of any kind, such as numbers of a regression, and reads them as 0.
    """

    data: Any
    batch_size: int = 16
    limit: int | None = None
    masks_for: Sequence[str] = ()
    label_maps: bool = False
    preprocess: Preprocess | None = None
    labels_used: bool = True

    def __post_init__(self) -> None:
        if is_folder(self.data):
            raise InputError(
                f"data: expected batches, a Dataset or a DataLoader, got the path {str(self.data)!r}"
            )
        if not isinstance(self.data, (Iterable, Dataset)):
            raise InputError(
                "data: expected a folder, a list of batches, a Dataset or a DataLoader, "
                f"got {type(self.data).__name__}"
            )

    @property
    def count(self) -> int | None:
        """The number of images; None if it is not known before they are read."""
        source = self.data.dataset if isinstance(self.data, DataLoader) else self.data
        count: int | None = None
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            count = len(source)  # type: ignore[arg-type]
        elif isinstance(source, list):
            count = sum(len(batch[0]) for batch in source if isinstance(batch, (tuple, list)) and batch)
        return count if count is None or self.limit is None else min(count, self.limit)

    @property
    def rereadable(self) -> bool:
        """Whether the data can be read again from the start; False for a generator."""
        return isinstance(self.data, Dataset) or iter(self.data) is not self.data

    def __iter__(self) -> Iterator[TensorBatch]:
        """Every batch, at most `limit` images; at least one batch, or `InputError`."""
        before = 0
        for number, parts in enumerate(self._batches()):
            if self.limit is not None and before >= self.limit:
                return
            batch = self._checked(parts, number, before)
            if self.limit is not None:
                batch = batch[: self.limit - before]
            before += len(batch)
            yield batch
        if before == 0:
            raise InputError("data: expected at least one batch, got none (a generator that is exhausted?)")

    # -- batches ---------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[Any]:
        if not isinstance(self.data, Dataset):
            yield from self.data
            return
        samples: list[Sequence[Any]] = []
        for number, sample in enumerate(_samples(self.data)):
            if self.limit is not None and number >= self.limit:
                break
            samples.append(self._prepared(sample, number))
            if len(samples) == self.batch_size:
                yield self._stacked(samples, number)
                samples = []
        if samples:
            yield self._stacked(samples, number)

    def _prepared(self, sample: Any, number: int) -> Sequence[Any]:
        """(image, label) or (image, label, mask), PIL images preprocessed."""
        if not isinstance(sample, (tuple, list)) or len(sample) not in (2, 3):
            raise InputError(
                "data: expected a Dataset of (image, label) or (image, label, mask), "
                f"got {_kinds(sample)} at index {number}"
            )
        image, label, *mask = sample
        if isinstance(image, Image.Image):
            if self.preprocess is None:
                raise InputError(
                    "data: the Dataset gives PIL images, and how this model preprocesses them is not known. "
                    "Give a model from load_model, or a Dataset with a transform."
                )
            image = self.preprocess(to_rgb(image))
        return [image, self._as_map(label), *map(self._as_map, mask)]

    def _as_map(self, value: Any) -> Any:
        """A mask or label map that is a PIL image, with the geometry of the images."""
        if not isinstance(value, Image.Image) or self.preprocess is None:
            return value
        return self.preprocess.mask(value, padding=255 if self.label_maps else 0)

    def _stacked(self, samples: Sequence[Sequence[Any]], number: int) -> list[Tensor]:
        try:
            return [
                torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*samples, strict=True)
            ]
        except (TypeError, ValueError, RuntimeError) as error:
            first = number - len(samples) + 1
            raise InputError(
                f"data: the samples {first} to {number} of the Dataset cannot be stacked ({error}). "
                "Expected images of one size, and a label each."
            ) from error

    def _checked(self, parts: Any, number: int, before: int) -> TensorBatch:
        images, labels, *rest = _tensors(parts, number)
        if images.dim() != 4:
            raise InputError(
                f"images: expected (B, 3, H, W), got {tuple(images.shape)} as batch {number}. "
                "A torch DataLoader makes batches."
            )
        if not len(images):
            raise InputError(f"images: expected at least one image, batch {number} is empty")
        if not images.is_floating_point():
            raise InputError(
                f"images: expected floating point, normalized as the model takes them, got {images.dtype} "
                f"in batch {number}"
            )
        if not self.labels_used:
            labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        shape = (len(images), *images.shape[-2:]) if self.label_maps else (len(images),)
        if labels.is_floating_point() or labels.dtype == torch.bool or tuple(labels.shape) != shape:
            expected = f"label maps {shape} of integers" if self.label_maps else f"{len(images)} integers"
            raise InputError(
                f"labels: expected {expected}, got {labels.dtype} of shape {tuple(labels.shape)} "
                f"in batch {number}"
            )
        masks = _checked_masks(rest[0], images, number) if rest else None
        if masks is None and self.masks_for:
            raise InputError(
                f"{', '.join(self.masks_for)}: expected masks, but batch {number} has none. "
                "Give (images, labels, masks)."
            )
        names = tuple(str(before + i) for i in range(len(images)))
        return TensorBatch(names, images, labels.long(), masks)


def _samples(dataset: Dataset[Any]) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        yield from dataset
    else:  # the length ends it: a Dataset need not raise IndexError
        yield from (dataset[index] for index in range(len(dataset)))  # type: ignore[arg-type]


def _tensors(parts: Any, number: int) -> list[Tensor]:
    message = (
        "data: expected batches (images, labels) or (images, labels, masks) of tensors, "
        f"got {_kinds(parts)} as batch {number}."
    )
    if not isinstance(parts, (tuple, list)) or len(parts) not in (2, 3):
        raise InputError(f"{message} Put a single batch into a list: [(images, labels)].")
    try:
        return [part if isinstance(part, Tensor) else torch.as_tensor(part) for part in parts]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(message) from error


def _kinds(parts: Any) -> str:
    if not isinstance(parts, (tuple, list)):
        return type(parts).__name__
    return str([type(part).__name__ for part in parts])


def _checked_masks(masks: Tensor, images: Tensor, number: int) -> UInt8[Tensor, "b h w"]:
    """Masks of 255, 128 and 0."""
    if masks.dim() == 4 and masks.shape[1] == 1:
        masks = masks[:, 0]
    shape = (len(images), *images.shape[-2:])
    if tuple(masks.shape) != shape:
        raise InputError(
            f"masks: expected {shape}, the size of the images, got {tuple(masks.shape)} in batch {number}"
        )
    values = set(masks.unique().tolist())
    if values <= {0, 1}:
        return masks.to(torch.uint8) * OBJECT
    if not values <= {0, BORDER, OBJECT}:
        raise InputError(
            "masks: expected 255 (object), 128 (border) and 0, or 1 and 0; "
            f"got {sorted(values)[:8]} in batch {number}"
        )
    return masks.to(torch.uint8)
