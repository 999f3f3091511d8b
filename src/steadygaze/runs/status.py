"""How far a run has come: progress files in its folder, and the status that is computed from them.

Each process counts its images and rows while jobs come in and are done, and replaces `progress-*.json`
atomically, at most every `INTERVAL` seconds, and once more when it ends. A run never fails because of it.
Readers treat it as an untrusted file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from steadygaze.errors import InputError
from steadygaze.files import is_locked, write_atomic
from steadygaze.progress import Progress
from steadygaze.runs.rows import Row, RowKey, Rows, row_key
from steadygaze.runs.shards import Shard, World, lock_file
from steadygaze.runs.store import Done
from steadygaze.untrusted import check_complete, read_json, read_record

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

    Attributes:
        state: Running, finished, interrupted or failed; a process that was killed is still "running" here.
        units: Of the progress bar.
        resumed: How many of them an earlier run did.
        began: When it began, in seconds since 1970.
        updated: When it last reported, in seconds since 1970.
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
        path = folder / name
        try:
            record = read_record(ProcessProgress, read_json(folder, name, ": delete it"), str(path))
        except FileNotFoundError:
            continue
        index, count = record.shard
        rank, size = record.process
        if not index < count or not rank < size:
            raise InputError(f"{path}: expected shard I of N and process I of N, got {index} of {count}")
        records.append(record)
    return records


def others_are_running(folder: Path, shard: Shard) -> bool:
    """Whether other shards of this run write into the folder and have not finished."""
    others = [p for p in read_progress(folder) if p.shard[1] == shard.count and p.shard[0] != shard.index]
    finished = {(p.shard[0], p.process[0]) for p in others if p.state == "finished"}
    complete = {p.shard[0] for p in others if all((p.shard[0], r) in finished for r in range(p.process[1]))}
    return bool(others) and len(complete) < shard.count - 1


class Tally:
    """Counts of the jobs of one process. An image is done when no job with rows of it is left.

    Attributes:
        done: What was there before complete: whether all jobs are known, so that totals are.
    """

    def __init__(self, done: Done) -> None:
        self.done = done
        self.complete = False
        self._open: dict[str, int] = {}  # image -> jobs that are not done
        self._images = self._rows = self._rows_total = 0

    def add_jobs(self, jobs: Iterable[tuple[Sequence[str], tuple[RowKey, ...], bool]]) -> None:
        """Jobs that this process owns: (images, keys of the rows of each, whether rows are missing)."""
        for images, keys, pending in jobs:
            if not keys:
                continue
            self._rows_total += len(images) * len(keys)
            for image in images:
                self._rows += self.done.count(image, keys)
                self._images -= self._open.get(image) == 0
                self._open[image] = self._open.get(image, 0) + 1
            if not pending:
                self.finish_job(images, keys)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Rows that were written."""
        for row in rows:
            if "unreadable" in row:
                continue
            self._rows += 1
            if row.get("flag"):
                self.done.flagged.add((row["image"], *row_key(row)[:2]))

    def finish_job(self, images: Sequence[str], keys: Sequence[object]) -> None:
        """A job that is done, or was done before."""
        for image in images if keys else ():
            self._open[image] -= 1
            self._images += self._open[image] == 0

    def counts(self) -> Counts:
        """What there is now."""
        unreadable = sum(image in self._open for image in self.done.unreadable)
        return Counts(
            self._images,
            len(self._open) if self.complete else None,
            self._rows,
            self._rows_total if self.complete else None,
            unreadable,
            sum(image in self._open for image, _, _ in self.done.flagged),
        )


SILENT = 60.0  # seconds without an update after which a process counts as dead, if locks cannot be tested
RUNNING, FINISHED, DIED, NOT_STARTED = "running", "done", "died", "not started"
STOPPED = ("interrupted", "failed")


@dataclass(frozen=True)
class ShardStatus:
    """One shard, all of its processes together.

    Attributes:
        state: Done, running, died, interrupted, failed or not started.
        rate: Units a second.
        left: Seconds until it is done, None if unknown.
        seen: Seconds since the last sign of life.
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
        return [shard for shard in self.shards if shard.state in (DIED, *STOPPED)]

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
    """Add counts; a total is None if one of them is."""
    each = list(map(vars, parts))
    columns = {name: [counts[name] for counts in each] for name in vars(Counts())}
    sums: dict[str, Any] = {name: None if None in n else sum(n) for name, n in columns.items()}
    return Counts(**sums)


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
        settings.get("images"),
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
        return record.state
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
    except OSError:  # a process of another user
        pass
    return True
