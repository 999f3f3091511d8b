"""The processes of a run: shards, which are independent jobs, and the processes that share one of them.

Batches are dealt out by number: shard I of N does the batches I, I + N, I + 2N, ... The composition of a
batch does not depend on N, so the rows of N shards are those of one job.

| file | locked by |
| --- | --- |
| `.lock` | a whole run: alone; a shard: together with other shards |
| `.lock-00003of00016` | shard 3 of 16: alone |

Two numbers of shards deal out the batches differently, so they do not run at the same time: a shard takes its
own lock first and then looks for locks of another N. Of two that start in the same instant at least one is
refused.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygaze.errors import InputError
from steadygaze.files import LOCK, FileLock, is_locked, lock_folder

if TYPE_CHECKING:
    import torch  # 500 MiB that readers of rows do not need

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

        Examples:
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

    Examples:
        >>> shard_of_file(Path("rows-00003of00016-00000.jsonl"))
        Shard(index=3, count=16)
        >>> shard_of_file(Path("rows-00000.jsonl"))
        Shard(index=0, count=1)
    """
    match = _IN_NAME.search(path.name)
    return Shard(int(match[1]), int(match[2])) if match else WHOLE


def parse_shard(given: Any) -> Shard:
    """From "I/N", (I, N) or a `Shard`; None is a whole run.

    Examples:
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
        raise InputError(
            f"shard: expected I/N with I from 0 to N-1 and N at most {MOST:,}, such as 0/4, got {given!r}",
            option="shard",
        )
    return Shard(index, count)


def lock_run(folder: Path, shard: Shard) -> ExitStack:
    """Lock a run folder, which must exist, for a whole run or for one shard, until the result is closed."""
    with ExitStack() as locks:
        if not shard:
            locks.enter_context(lock_folder(folder))
            return locks.pop_all()
        locks.enter_context(FileLock(folder / LOCK, shared=True))
        locks.enter_context(FileLock(lock_file(folder, shard)))
        for path in sorted(folder.glob(f"{LOCK}-*of*")):
            other = shard_of_file(path)
            if other.count != shard.count and is_locked(path):
                raise InputError(
                    f"{folder}: shard {other} is being written, and {shard} splits the run differently. Wait "
                    f"for the {other.count} shards, or choose another output folder.",
                    option="shard",
                )
        return locks.pop_all()


def lock_file(folder: Path, shard: Shard) -> Path:
    """The file that is locked while this shard is written."""
    return folder / "-".join(filter(None, (LOCK, shard.label)))


LONGEST_WAIT = timedelta(days=30)  # a process may wait for a slower one at the end of a run


@dataclass(frozen=True)
class World:
    """Which process this is, of how many, and how they wait for one another.

    Attributes:
        shard: The part of the run that these processes share.
    """

    rank: int = 0
    size: int = 1
    local_main: bool = True
    device: torch.device | None = None
    wait: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    shard: Shard = WHOLE

    def owns(self, batch: int) -> bool:
        """Whether this process computes the batch of this number."""
        return self.shard.owns(batch) and batch // self.shard.count % self.size == self.rank

    @property
    def label(self) -> str:
        """In the names of this process's files: its number, after its shard."""
        return "-".join(filter(None, (self.shard.label, f"{self.rank:05d}")))

    def of_shard(self, shard: Shard) -> World:
        """These processes, sharing this part of a run."""
        return replace(self, shard=shard)


def world() -> World:
    """Return which process this is of those that `accelerate launch` or `torchrun` started, if any."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
            warnings.warn(
                "accelerate launch --cpu starts a single process, whatever --num_processes is (it leaves "
                "that to MPI). On CPUs use accelerate launch --multi_gpu --num_processes 2 -m steadygaze ... "
                "or torchrun.",
                stacklevel=2,
            )
        return World()
    import torch
    from accelerate import PartialState

    forced_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    state = PartialState(cpu=forced_cpu or not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    return World(
        state.process_index,
        state.num_processes,
        state.is_local_main_process,
        state.device,
        state.wait_for_everyone,
        state.destroy_process_group,
    )
