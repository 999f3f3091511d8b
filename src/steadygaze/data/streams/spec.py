"""How streamed data is named: `wds:SHARDS?OPTIONS` and `hf:DATASET?OPTIONS`.

| data | what it is |
| --- | --- |
| `wds:val-{0000..0015}.tar` | WebDataset shards: local files, `pipe:COMMAND`, or URLs of fsspec |
| `hf:owner/name` | a dataset of the Hugging Face hub |
| `hf:./folder` | a folder of Parquet, Arrow or image files |

OPTIONS are `name=value`, separated by commas: `wds:val-{0000..0015}.tar?image=png,label_names=synsets.txt`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput, UnknownName

SHARED = ("image", "label", "mask", "label_names")
OPTIONS = {"wds": SHARED, "hf": (*SHARED, "key", "split", "config", "revision")}


@dataclass(frozen=True)
class StreamSpec:
    """Data that is read as a stream.

    kind: "wds" or "hf"
    location: pattern of shards, name of a dataset, or folder
    image, label, mask: extensions in a tar archive, columns of a table
    label_names: a text file: integer labels are lines of it, from 0
    """

    kind: str
    location: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> StreamSpec:
        """Read a specification.

        >>> StreamSpec.parse("wds:val-{0..3}.tar?label=cls").options
        {'label': 'cls'}
        """
        kind, _, rest = text.partition(":")
        location, mark, options = rest.rpartition("?")
        if not mark or not re.match(r"[a-z_]+=", options):  # a URL may have a question mark of its own
            location, options = rest, ""
        if not location:
            raise BadInput(f"data: expected {kind}: and a location after it, got {text!r}")
        return cls(kind, location, _options(kind, options))

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}:{self.location}{'?' if options else ''}{options}"

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the integer labels, from the file that the options name."""
        if "label_names" not in self.options:
            return None
        file = Path(self.options["label_names"])
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise BadInput(f"label_names: {file} cannot be read: {reason}") from error
        return tuple(line.strip() for line in lines if line.strip())


def _options(kind: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if name not in OPTIONS[kind]:
            raise UnknownName(f"option of {kind}: data", name, OPTIONS[kind])
        if not equals or not value:
            raise BadInput(f"data: expected {name}=VALUE after the question mark, got {part!r}")
        options[name] = value
    return options


def is_stream(data: Any) -> bool:
    """Whether this text names streamed data."""
    return isinstance(data, str) and data.partition(":")[0] in OPTIONS and ":" in data


def parse_data(data: Any) -> Any:
    """`data` as it is processed: text becomes a `StreamSpec` or a path, everything else stays."""
    if is_stream(data):
        return StreamSpec.parse(data)
    return Path(data) if isinstance(data, str) else data
