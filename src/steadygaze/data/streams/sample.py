"""What readers of streams give, before labels are looked up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from steadygaze.data.images import EncodedImage
from steadygaze.errors import BadImage

MAX_BYTES = 512 * 2**20  # of an encoded image; MAX_PIXELS of `read_image` take less, uncompressed too
MAX_LABEL = 4096  # bytes of a label


@dataclass(frozen=True)
class ImageBytes:
    """An encoded image in memory."""

    name: str
    data: bytes = field(repr=False)

    def read(self) -> bytes:
        """Its bytes."""
        return self.data

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FilePart:
    """An encoded image inside a larger local file, which is read when the image is needed."""

    name: str
    file: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """Its bytes."""
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.offset)
                data = opened.read(self.size)
        except OSError as error:
            raise BadImage(f"{self.name}: {error.strerror}") from error
        if len(data) < self.size:
            raise BadImage(f"{self.name}: expected {self.size} bytes, got {len(data)}: the file is truncated")
        return data

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Unusable:
    """In place of an image that cannot be used; reading it states the reason."""

    name: str
    reason: str

    def read(self) -> bytes:
        """Raises `BadImage`."""
        raise BadImage(self.reason)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Sample:
    """One image of a stream.

    key: identifies it in the data, wherever it is stored
    holder: the shard or data set that holds it
    label: as given in the data; None if there is none
    problem: why it cannot be used, "" if it can
    """

    key: str
    holder: str
    image: EncodedImage | None = None
    label: str | None = None
    mask: EncodedImage | None = None
    problem: str = ""

    @property
    def place(self) -> str:
        """Where it is, for errors."""
        return f"{self.holder}: {self.key}"


class SampleReader(Protocol):
    """Reads the samples of some data, from the start for every call of `samples`.

    damaged: what could not be read whole, by shard or data set; filled while samples are read
    label_names: names of integer labels that the data itself declares
    """

    damaged: dict[str, str]
    label_names: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """Of the data, for people."""
        ...

    @property
    def layout(self) -> str:
        """The kind of data, for people."""
        ...

    @property
    def local(self) -> bool:
        """Whether reading it again costs little."""
        ...

    def samples(self) -> Iterator[Sample]: ...

    def count(self, limit: int | None) -> int | None:
        """The number of samples, at most `limit`; None if it is not known without reading everything."""
        ...

    def facts(self) -> dict[str, Any]:
        """What identifies the data, for the settings of a run."""
        ...
