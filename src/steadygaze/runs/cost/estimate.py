"""The estimate of a run: what is left to do, what it costs, and how long it takes on one or many shards."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch

from steadygaze.errors import InputError
from steadygaze.runs.loop import Inputs, Job, Run
from steadygaze.runs.rows import RowKey
from steadygaze.runs.shards import Shard

SHARDS = (1, 8, 64)
J = TypeVar("J", bound=Job)
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A part of the work: forward passes and seconds of all images that are left."""

    name: str
    passes: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """What a run will cost. Only what is left is counted; `images` and `rows` also have what is done.

    images, images_left: images of the run, and those that lack rows
    rows, rows_left: rows of the run (of a training, lines of the log), and those that are missing
    passes: forward passes; a backward pass counts as one, a run on half of the tokens half
    seconds: on this device, from the first row to the last
    startup: seconds before that, which every shard spends: loading the model, listing the images
    bytes: on disk, for what is left
    memory: bytes at the peak, of the GPU or of the process
    shards: number of shards -> seconds of the slowest one, startup included; empty for a shard
    parts: where forward passes and seconds go; loading beside the model hides behind it
    """

    task: str
    model: str
    device: str
    images: int
    images_left: int
    rows: int
    rows_left: int
    passes: float
    seconds: float
    startup: float
    bytes: float
    memory: float
    shards: Mapping[int, float]
    parts: Sequence[Part] = ()
    notes: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check_shards(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers of shards, in order."""
    given = tuple(sorted(set(numbers)))
    if not given or given[0] < 1:
        raise InputError(f"shards: expected whole numbers of 1 or more, such as 1,8,64, got {list(numbers)}")
    return given


def note_of_shard(shard: Shard) -> list[str]:
    """A note that the estimate covers a part of the run, if it does."""
    return [f"of shard {shard} only; leave out --shard to estimate the whole run"] if shard else []


@dataclass(frozen=True)
class Speed:
    """How loading and the model share the machine.

    workers: threads or processes that load ahead; 0: loading and the model take turns
    device: of the model
    """

    workers: int
    device: torch.device

    def together(self, model: float, loading: float) -> float:
        """Seconds of a run, from the seconds that each would take alone."""
        if not self.workers:
            return model + loading
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        beside = loading / min(self.workers, cores)
        if self.device.type != "cpu":
            return max(model, beside)
        busy = (model * min(cores, torch.get_num_threads()) + loading) / cores  # both use the same cores
        return max(model, beside, busy)


@dataclass
class Work:
    """The work that is left, by batch: a shard does batches i, i + N, i + 2 N, ...

    every: seconds (model, loading) that each shard spends, for jobs that others require
    """

    speed: Speed
    startup: float
    batches: dict[int, tuple[float, float]] = field(default_factory=dict)
    every: tuple[float, float] = (0.0, 0.0)

    def add(self, batch: int, model: float, loading: float) -> None:
        before = self.batches.get(batch, (0.0, 0.0))
        self.batches[batch] = before[0] + model, before[1] + loading

    def seconds(self, shards: int = 1) -> float:
        """Seconds of the slowest shard, without startup."""
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for batch, (model, loading) in self.batches.items():
            sums[batch % shards][0] += model
            sums[batch % shards][1] += loading
        each = [self.speed.together(m + self.every[0], load + self.every[1]) for m, load in sums.values()]
        return max(each, default=0.0)

    def by_shards(self, numbers: Iterable[int]) -> dict[int, float]:
        """Seconds of the slowest of this number of shards, startup included."""
        return {number: self.startup + self.seconds(number) for number in numbers}


@dataclass(frozen=True)
class Left:
    """What is left of a run.

    jobs: the jobs that are left
    images: of all jobs; images_left: those that lack rows
    rows: of all jobs; missing: rows that are not written yet, by row key
    name_length: mean length of the names of images, in bytes
    """

    jobs: list[Any]
    images: int
    images_left: int
    rows: int
    missing: Mapping[RowKey, int]
    name_length: float

    @property
    def rows_left(self) -> int:
        return sum(self.missing.values())


def what_is_left(run: Run, jobs: Sequence[Any], loader: Any) -> Left:
    """Compare the jobs of this process with the rows that the folder holds; nothing is written."""
    own = [job for job in jobs if run.world.owns(job.batch)]
    run.read_done()
    remaining = run.remaining(jobs, loader)
    lacking: set[str] = set()
    missing: Counter[RowKey] = Counter()
    for job in remaining:
        for image, key in run.missing(job):
            missing[key] += 1
            lacking.add(image)
    names = {image for job in own for image in job.images}
    rows = sum(len(job.images) * len(job.keys) for job in own)
    name_length = sum(len(name.encode()) for name in names) / max(1, len(names))
    return Left(remaining, len(names), len(lacking), rows, missing, name_length)


def sample_jobs(jobs: Sequence[J], load: Callable[[J], Inputs[T]]) -> list[tuple[J, Inputs[T]]]:
    """Two jobs of full size with images that can be read: the first, and one from the middle."""
    full = max(len(job.images) for job in jobs)
    large = [job for job in jobs if len(job.images) == full]
    first = large[:: max(1, len(large) // 2)][:2]
    samples: list[tuple[J, Inputs[T]]] = []
    for job in chain(first, (job for job in jobs if job not in first)):
        inputs = load(job)
        if inputs.data is not None:
            samples.append((job, inputs))
        if len(samples) == len(first):
            break
    if not samples:
        raise InputError(
            f"dry run: none of the images that are left can be read, such as {jobs[0].images[0]}"
        )
    return samples
