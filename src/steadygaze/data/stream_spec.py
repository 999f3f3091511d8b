"""How streamed data is named: `wds:SHARDS?OPTIONS` and `hf:DATASET?OPTIONS`.

| data | what it is |
| --- | --- |
| `wds:val-{0000..0015}.tar` | WebDataset shards: local files, `pipe:COMMAND`, or URLs of fsspec |
| `hf:owner/name` | a dataset of the Hugging Face hub |
| `hf:./folder` | a folder of Parquet, Arrow or image files |

OPTIONS are `name=value`, separated by commas: `wds:val-{0000..0015}.tar?image=png,label_names=synsets.txt`.

`Sample` is what the readers of both kinds give, before labels are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygaze.data.images import EncodedImage
from steadygaze.errors import ImageError, InputError, UnknownNameError
from steadygaze.untrusted import read_text

SHARED = ("image", "label", "mask", "label_names")

OPTIONS = {"wds": SHARED, "hf": (*SHARED, "key", "split", "config", "revision")}


@dataclass(frozen=True)
class StreamSpec:
    """Data that is read as a stream.

    Attributes:
        kind: "wds" or "hf".
        location: Pattern of shards, name of a dataset, or folder.
        options: `image`, `label` and `mask` are extensions in a tar archive, or columns of a table;
            `label_names` is a text file whose lines name the integer labels, from 0.
    """

    kind: str
    location: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> StreamSpec:
        """Read a specification.

        Examples:
            >>> StreamSpec.parse("wds:val-{0..3}.tar?label=cls").options
            {'label': 'cls'}
        """
        kind, _, rest = text.partition(":")
        location, mark, options = rest.rpartition("?")
        if not mark or not re.match(r"[a-z_]+=", options):  # a URL may have a question mark of its own
            location, options = rest, ""
        if not location:
            raise InputError(f"data: expected {kind}: and a location after it, got {text!r}")
        parsed: dict[str, str] = {}
        for part in filter(None, options.split(",")):
            name, equals, value = part.partition("=")
            if name not in OPTIONS[kind]:
                raise UnknownNameError(f"option of {kind}: data", name, OPTIONS[kind])
            if not equals or not value:
                raise InputError(f"data: expected {name}=VALUE after the question mark, got {part!r}")
            parsed[name] = value
        return cls(kind, location, parsed)

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}:{self.location}{'?' if options else ''}{options}"

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the integer labels, from the file that the options name."""
        if "label_names" not in self.options:
            return None
        try:
            lines = read_text(self.options["label_names"]).splitlines()
        except InputError as error:
            raise InputError(f"label_names: {error}") from error
        return tuple(line.strip() for line in lines if line.strip())


def is_stream(data: Any) -> bool:
    """Whether this text names streamed data."""
    return isinstance(data, str) and data.partition(":")[0] in OPTIONS and ":" in data


def parse_data(data: Any) -> Any:
    """`data` as it is processed: text becomes a `StreamSpec` or a path, everything else stays."""
    if is_stream(data):
        return StreamSpec.parse(data)
    return Path(data) if isinstance(data, str) else data


MAX_BYTES = 512 * 2**20  # of an encoded image; MAX_PIXELS of `read_image` take less, uncompressed too

MAX_LABEL = 4096  # bytes of a label


@dataclass(frozen=True)
class ImageBytes(EncodedImage):
    """An encoded image in memory."""

    data: bytes = field(repr=False)

    def read(self) -> bytes:
        """Return the bytes of the image file."""
        return self.data


@dataclass(frozen=True)
class FilePart(EncodedImage):
    """An encoded image inside a larger local file, which is read when the image is needed."""

    file: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the bytes of the image file."""
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.offset)
                data = opened.read(self.size)
        except OSError as error:
            raise ImageError(f"{self.name}: {error.strerror}") from error
        if len(data) < self.size:
            raise ImageError(
                f"{self.name}: expected {self.size} bytes, got {len(data)}: the file is truncated"
            )
        return data


@dataclass(frozen=True)
class Unusable(EncodedImage):
    """Stands for an image that cannot be used; reading it states the reason."""

    reason: str

    def read(self) -> bytes:
        """Raise `ImageError` with the reason."""
        raise ImageError(self.reason)


@dataclass(frozen=True)
class Sample:
    """One image of a stream.

    Attributes:
        key: Identifies it in the data, wherever it is stored.
        holder: The shard or data set that holds it.
        label: As given in the data; None if there is none.
        group: Name of its group, if groups were asked for.
        problem: Why it cannot be used, "" if it can.
    """

    key: str
    holder: str
    image: EncodedImage | None = None
    label: str | None = None
    mask: EncodedImage | None = None
    problem: str = ""
    group: str = ""

    @property
    def place(self) -> str:
        """Where it is, for errors."""
        return f"{self.holder}: {self.key}"
