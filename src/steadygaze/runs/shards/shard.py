"""A shard: one of N independent jobs that together make one run.

Batches are dealt out by number: shard I of N does the batches I, I + N, I + 2N, ... The composition of a
batch does not depend on N, so the rows of N shards are those of one job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput

MOST = 99_999  # shards of a run
_IN_NAME = re.compile(r"(\d{5})of(\d{5})")


@dataclass(frozen=True)
class Shard:
    """Shard `index` (from 0) of `count`; the default is a whole run."""

    index: int = 0
    count: int = 1

    def __bool__(self) -> bool:
        """Whether this is a part of a run, not the whole."""
        return self.count > 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def label(self) -> str:
        """In names of files; empty for a whole run.

        >>> Shard(3, 16).label, Shard().label
        ('00003of00016', '')
        """
        return f"{self.index:05d}of{self.count:05d}" if self else ""

    def owns(self, number: int) -> bool:
        """Whether this shard does the batch of this number."""
        return number % self.count == self.index

    def may_hold_own(self, path: Path) -> bool:
        """Whether a file of rows may hold rows of this shard's batches. Files of the other shards of the same
        N do not; after a change of N every older file may.
        """
        written = shard_of_file(path)
        return written.count != self.count or written.index == self.index


WHOLE = Shard()


def shard_of_file(path: Path) -> Shard:
    """The shard that wrote a file, by its name.

    >>> shard_of_file(Path("rows-00003of00016-00000.jsonl"))
    Shard(index=3, count=16)
    >>> shard_of_file(Path("rows-00000.jsonl"))
    Shard(index=0, count=1)
    """
    found = _IN_NAME.search(path.name)
    return Shard(int(found[1]), int(found[2])) if found else WHOLE


def parse_shard(given: Any) -> Shard:
    """From "I/N", (I, N) or a `Shard`; None is a whole run.

    >>> parse_shard("2/8"), parse_shard((2, 8)) == parse_shard("2/8")
    (Shard(index=2, count=8), True)
    """
    if given is None:
        return WHOLE
    if isinstance(given, Shard):
        return given
    parts = given.split("/") if isinstance(given, str) else given
    try:
        index, count = (int(part) for part in parts)
    except (TypeError, ValueError):
        index, count = -1, 0
    if not 0 <= index < count <= MOST:
        raise BadInput(
            f"shard: expected I/N with I from 0 to N-1 and N at most {MOST:,}, such as 0/4, got {given!r}",
            option="shard",
        )
    return Shard(index, count)
