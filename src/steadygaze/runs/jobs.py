"""The images of a run and the jobs that they form, as plain data.

Suites name them and reports read suites, so this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from PIL import Image

from steadygaze.data.folders import Item
from steadygaze.runs.rows import RowKey
from steadygaze.runs.settings import Condition

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Reader(Protocol):
    """Reads the images of a suite's own set. ready: they have the model's size and are shown without
    resizing."""

    @property
    def ready(self) -> bool: ...

    def read(self, item: Item) -> Image.Image: ...


@dataclass(frozen=True)
class RunImage:
    """One image of a run.

    Attributes:
        name: Its name in the rows.
        labels: Every correct class; empty if its label is not known.
        item: Its file; None for an image in memory.
        reader: Reads an image of a suite's own set; None for an image of the data.
        group: The part of a set, or the group of the data, that it belongs to; noted in its rows.
        tensor: (3, H, W), an image in memory as it was given, normalized.
        mask: (H, W), the mask or label map of an image in memory.
    """

    name: str
    labels: tuple[int, ...]
    item: Item | None = None
    reader: Reader | None = None
    group: str = ""
    tensor: Tensor | None = field(default=None, compare=False, repr=False)
    mask: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, item: Item) -> RunImage:
        return cls(item.name, () if item.label is None else (item.label,), item, group=item.group)


@dataclass(frozen=True)
class Job:
    """Images that are computed together. Plain data, so that it can be pickled.

    Attributes:
        run_images: The images.
        keys: The rows that each of these images must have in the end.
        batch: Its number decides which shard and process does the job (`World.owns`), so jobs of one batch
            stay together.
        work: Units of progress; 0 is the number of images.
        requires: Jobs without rows of their own that come before the first unfinished job that requires them.
        condition: What is done to the images; None in `verify`.
        set_name: Name of the image set that references belong to.
    """

    run_images: tuple[RunImage, ...]
    keys: tuple[RowKey, ...]
    batch: int = 0
    work: int = 0
    requires: tuple[Job, ...] = field(default=(), repr=False)
    condition: Condition | None = None
    set_name: str = ""

    @cached_property
    def images(self) -> tuple[str, ...]:
        """Names, as written to rows."""
        return tuple(image.name for image in self.run_images)

    @property
    def size(self) -> int:
        """Units of progress."""
        return self.work or len(self.run_images)

    def image(self, name: str) -> RunImage:
        """The image of this name."""
        return self.run_images[self.images.index(name)]


@dataclass(frozen=True)
class Inputs(Generic[T]):
    """What loading a job gives.

    Attributes:
        data: For the function that computes; None if no image of the job could be read.
        content: Image -> content hash, for each image that was read.
        unreadable: Image -> reason.
    """

    data: T | None
    content: Mapping[str, str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
