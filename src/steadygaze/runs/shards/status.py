"""The status of a run, from its progress files: finished shards, progress of the others, and dead ones."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygaze.files import is_locked
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards.locks import lock_file
from steadygaze.runs.shards.progress_files import Counts, ProcessProgress, read_progress
from steadygaze.runs.shards.shard import Shard
from steadygaze.runs.untrusted.schema import check_complete

SILENT = 60.0  # seconds without an update after which a process counts as dead, if locks cannot be tested
RUNNING, FINISHED, DIED, NOT_STARTED = "running", "done", "died", "not started"
STOPPED = {"interrupted": "interrupted", "failed": "failed"}


@dataclass(frozen=True)
class ShardStatus:
    """One shard, all of its processes together.

    state: done, running, died, interrupted, failed or not started
    rate: units a second
    left: seconds until it is done, None if unknown
    seen: seconds since the last sign of life
    """

    shard: Shard
    state: str
    counts: Counts = field(default_factory=Counts)
    unit: str = "images"
    rate: float = 0.0
    left: float | None = None
    seen: float | None = None
    processes: int = 0
    host: str = ""
    error: str = ""

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "shard": self.shard.index,
            "state": self.state,
            **vars(self.counts),
            "unit": self.unit,
            "units_per_second": round(self.rate, 4),
            "seconds_left": None if self.left is None else round(self.left, 1),
            "seconds_since_seen": None if self.seen is None else round(self.seen, 1),
            "processes": self.processes,
            "host": self.host,
            "error": self.error,
        }


@dataclass(frozen=True)
class RunStatus:
    """A run with its shards; a run that is not split has one."""

    kind: str
    model: str
    data: str
    folders: tuple[Path, ...]
    shards: tuple[ShardStatus, ...]
    images_total: int | None = None  # of the whole run, if its settings state it

    @property
    def counts(self) -> Counts:
        """The shards together; totals only if those of every shard are known."""
        return total(shard.counts for shard in self.shards)

    @property
    def rate(self) -> float:
        return sum(shard.rate for shard in self.shards if shard.state == RUNNING)

    @property
    def left(self) -> float | None:
        """Seconds until the last running shard is done; None if a shard has stopped or its end is unknown."""
        waiting = [shard for shard in self.shards if shard.state != FINISHED]
        times = [shard.left for shard in waiting if shard.state == RUNNING and shard.left is not None]
        return max(times, default=0.0) if len(times) == len(waiting) else None

    @property
    def stopped(self) -> list[ShardStatus]:
        """Shards whose command has to be repeated."""
        return [shard for shard in self.shards if shard.state in (DIED, *STOPPED.values())]

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "kind": self.kind,
            "model": self.model,
            "data": self.data,
            "folders": [str(folder) for folder in self.folders],
            "done": all(shard.state == FINISHED for shard in self.shards),
            **vars(self.counts),
            "units_per_second": round(self.rate, 4),
            "seconds_left": None if self.left is None else round(self.left, 1),
            "shards": [shard.record() for shard in self.shards],
        }


def total(parts: Iterable[Counts]) -> Counts:
    """The sum of counts; a total is None if one of them is."""
    rows = [vars(part) for part in parts]

    def added(name: str) -> Any:
        values = [row[name] for row in rows]
        return None if None in values else sum(values)

    return Counts(**{name: added(name) for name in vars(Counts())})


def run_status(*folders: str | Path) -> list[RunStatus]:
    """The status of the runs in these folders; folders of shards of one run are that run."""
    rows = Rows.read(*folders)
    check_complete(rows.runs, rows.folders)
    return [_status(run["settings"], paths) for run, paths in zip(rows.runs, rows.parts, strict=True)]


def _status(settings: dict[str, Any], folders: Sequence[Path]) -> RunStatus:
    found = [(folder, record) for folder in folders for record in read_progress(folder)]
    shards: list[ShardStatus] = []
    if found:
        count = max(found, key=lambda pair: pair[1].updated)[1].shard[1]  # after a change of N, the newest
        for index in range(count):
            own = [(folder, record) for folder, record in found if record.shard == [index, count]]
            shards.append(_shard_status(Shard(index, count), own))
    return RunStatus(
        settings.get("kind", "verify"),
        settings["model"],
        settings.get("data", ""),
        tuple(folders),
        tuple(shards),
        settings.get("pictures"),
    )


def _shard_status(shard: Shard, found: Sequence[tuple[Path, ProcessProgress]]) -> ShardStatus:
    if not found:
        return ShardStatus(shard, NOT_STARTED, Counts(images_total=None))
    newest = max((record for _, record in found), key=lambda record: record.updated)
    records = [record for _, record in found if record.process[1] == newest.process[1]]
    states = {_state(folder, shard, record) for folder, record in found if record in records}
    if len(records) < newest.process[1] and states == {FINISHED}:
        states = {NOT_STARTED}
    worst = (DIED, "failed", "interrupted", RUNNING, NOT_STARTED, FINISHED)
    state = next(state for state in worst if state in states)
    rates = [record.rate for record in records]
    lefts = [_left(record) for record in records if record.state == "running"]
    known = [left for left in lefts if left is not None]
    return ShardStatus(
        shard,
        state,
        total(record.counts for record in records),
        newest.unit,
        sum(rates),
        max(known, default=0.0) if state == RUNNING and len(known) == len(lefts) else None,
        time.time() - newest.updated,
        len(records),
        newest.host,
        next((record.error for record in records if record.error), ""),
    )


def _left(record: ProcessProgress) -> float | None:
    if record.units_total is None or not record.rate:
        return None
    age = time.time() - record.updated
    return max(0.0, (record.units_total - record.units) / record.rate - age)


def _state(folder: Path, shard: Shard, record: ProcessProgress) -> str:
    if record.state == "finished":
        return FINISHED
    if record.state in STOPPED:
        return STOPPED[record.state]
    if is_locked(lock_file(folder, shard)):
        return RUNNING
    if record.host == socket.gethostname():
        return RUNNING if _alive(record.pid) else DIED
    return RUNNING if time.time() - record.updated < SILENT else DIED


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
