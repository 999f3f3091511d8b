"""`progress-*.json` in a run folder: how far each process of a run has come, for `steadygaze status`.

A file is replaced atomically, at most every `INTERVAL` seconds while the process computes, and once more when
it ends. A run never fails because of it. Readers treat it as an untrusted file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from steadygaze.errors import BadInput
from steadygaze.files import write_atomic
from steadygaze.progress import Progress
from steadygaze.runs.processes import World
from steadygaze.runs.shards.shard import Shard
from steadygaze.runs.untrusted.json_files import inside, parse_json, read_bounded
from steadygaze.runs.untrusted.schema import read_record

INTERVAL = 3.0  # seconds between two writes
MAX_ERROR = 300  # characters of an error's message
Count = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=2_000)]


@dataclass(frozen=True)
class Counts:
    """What a process has done of its part, with what earlier runs did of it; None: not known yet."""

    images: Count = 0
    images_total: Count | None = None
    rows: Count = 0
    rows_total: Count | None = None
    unreadable: Count = 0
    flagged: Count = 0


@dataclass(frozen=True)
class ProcessProgress:
    """One process of a shard.

    state: running, finished, interrupted or failed; a process that was killed is still "running" here
    units: of the progress bar; resumed: how many of them an earlier run did
    began, updated: seconds since 1970
    """

    shard: Annotated[list[Count], Field(min_length=2, max_length=2)]
    process: Annotated[list[Count], Field(min_length=2, max_length=2)]
    state: Text
    host: Text
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]
    began: Seconds
    updated: Seconds
    unit: Text = "images"
    units: Count = 0
    units_total: Count | None = None
    resumed: Count = 0
    counts: Counts = field(default_factory=Counts)
    error: Text = ""

    @property
    def rate(self) -> float:
        """Units a second since this process began, without those of earlier runs."""
        seconds = self.updated - self.began
        return (self.units - self.resumed) / seconds if seconds > 0 and self.units > self.resumed else 0.0


class ProgressFile:
    """The file of one process, written while it computes."""

    def __init__(self, folder: Path, world: World) -> None:
        self.path = folder / f"progress-{world.label}.json"
        now = time.time()
        self._record = ProcessProgress(
            [world.shard.index, world.shard.count],
            [world.rank, world.size],
            "running",
            socket.gethostname(),
            os.getpid(),
            now,
            now,
        )
        self._write()
        self._written = float("-inf")  # the first report has the totals: it is written at once

    def report(self, progress: Progress, counts: Callable[[], Counts]) -> None:
        """Record the progress, if the last write is long enough ago."""
        if time.monotonic() - self._written < INTERVAL and progress.fraction != 1:
            return
        self._record = replace(
            self._record,
            unit=progress.unit,
            units=progress.done,
            units_total=progress.total,
            resumed=progress.resumed,
            counts=counts(),
        )
        self._write()

    def end(self, counts: Counts, error: BaseException | None) -> None:
        """Record how the process ended."""
        state = "finished" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt):
            state = "interrupted"
        text = "" if error is None else f"{type(error).__name__}: {error}"[:MAX_ERROR]
        self._record = replace(self._record, state=state, counts=counts, error=text)
        self._write()

    def _write(self) -> None:
        self._record = replace(self._record, updated=time.time())
        self._written = time.monotonic()
        with suppress(OSError):  # rows are what counts: a full disk is reported by them
            write_atomic(self.path, json.dumps(asdict(self._record)) + "\n")


def read_progress(folder: Path) -> list[ProcessProgress]:
    """The progress of every process that has written into this folder."""
    records = []
    for name in sorted(path.name for path in folder.glob("progress-*.json")):
        path = inside(folder, name)
        try:
            record = read_record(ProcessProgress, parse_json(read_bounded(folder, name)), str(path))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{path} cannot be read ({error}): delete it") from error
        index, count = record.shard
        rank, size = record.process
        if not index < count or not rank < size:
            raise BadInput(f"{path}: expected shard I of N and process I of N, got {index} of {count}")
        records.append(record)
    return records


def others_are_running(folder: Path, shard: Shard) -> bool:
    """Whether other shards of this run write into the folder and have not finished."""
    others = [p for p in read_progress(folder) if p.shard[1] == shard.count and p.shard[0] != shard.index]
    finished = {(p.shard[0], p.process[0]) for p in others if p.state == "finished"}
    complete = {p.shard[0] for p in others if all((p.shard[0], r) in finished for r in range(p.process[1]))}
    return bool(others) and len(complete) < shard.count - 1
