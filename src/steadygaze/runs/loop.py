"""The engine of `verify` and `stress`: jobs in, rows out.

The images of later jobs are loaded while the model works on earlier ones, in threads or worker processes. A
job is some images together with the rows that each of them must have in the end. What is on disk is skipped
by key, images that cannot be read are recorded and tried again when the run is resumed, images whose file
changed are computed again, and the rows of a job are written at once. The composition of a job depends on the
order of the data and the batch size only, never on what was done before or on the number of processes: so the
rows of a run that was stopped, or split, are those of an uninterrupted one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from steadygaze.errors import DamagedDataWarning, ImageError, SteadygazeError
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.jobs import Inputs, Job, RunImage
from steadygaze.runs.request import Request
from steadygaze.runs.rows import Row, RowKey, Rows, key_of
from steadygaze.runs.shards import World, lock_run
from steadygaze.runs.source import ImageLoader, Source
from steadygaze.runs.status import ProgressFile, Tally
from steadygaze.runs.store import Done, Store, holds_run, make_folder, prepare

Given = TypeVar("Given")
Made = TypeVar("Made")
PREFETCHED = 4  # jobs that each worker process loads ahead


def load_ahead(
    load: Callable[[Given], Made], jobs: Iterable[Given], num_workers: int = 0, *, processes: bool = False
) -> Iterator[tuple[Given, Made]]:
    """Every job with `load(job)`, in order.

    Args:
        jobs: An iterator is read a few jobs ahead, and not before worker processes have started.
        num_workers: Threads or worker processes that load ahead; 0: each job is loaded when its turn comes.
    """
    if isinstance(jobs, Sequence) and not jobs:
        return
    if not num_workers:
        yield from ((job, load(job)) for job in jobs)
    elif processes:
        yield from _in_processes(load, jobs, num_workers)
    else:
        yield from _in_threads(load, jobs, num_workers)


def _in_threads(
    load: Callable[[Given], Made], jobs: Iterable[Given], num_workers: int
) -> Iterator[tuple[Given, Made]]:
    pool = ThreadPoolExecutor(num_workers)
    waiting: deque[tuple[Given, Future[Made]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, pool.submit(load, job)))
            if len(waiting) > num_workers:
                first, loaded = waiting.popleft()
                yield first, loaded.result()
        while waiting:
            first, loaded = waiting.popleft()
            yield first, loaded.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Jobs(Dataset[Any], Generic[Given, Made]):
    """The jobs as a torch data set. Errors are returned, to be raised without the worker's traceback text.

    jobs: a list, which workers inherit, so that an index selects a job. Without one, a job is its own index.
    """

    def __init__(self, load: Callable[[Given], Made], jobs: Sequence[Given] | None) -> None:
        self.load, self.jobs = load, jobs

    def __getitem__(self, index: Any) -> Made | SteadygazeError:
        try:
            return self.load(index if self.jobs is None else self.jobs[index])
        except SteadygazeError as error:
            return error


class _Indices:
    """What selects each job in a worker; the jobs themselves are remembered in `sent`."""

    def __init__(self, jobs: Iterable[Any], sent: deque[Any]) -> None:
        self.jobs, self.sent = jobs, sent

    def __iter__(self) -> Iterator[Any]:
        listed = isinstance(self.jobs, Sequence)
        for index, job in enumerate(self.jobs):
            self.sent.append(job)
            yield index if listed else job


def _unchanged(loaded: Any) -> Any:
    return loaded


def _in_processes(
    load: Callable[[Given], Made], jobs: Iterable[Given], num_workers: int
) -> Iterator[tuple[Given, Made]]:
    options: dict[str, Any] = {"generator": torch.Generator()}  # the global random state stays as it was
    if sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods():
        options["multiprocessing_context"] = "fork"  # starts at once; the workers use no GPU
    sent: deque[Given] = deque()
    loader = DataLoader(
        _Jobs(load, jobs if isinstance(jobs, Sequence) else None),
        batch_size=None,
        sampler=_Indices(jobs, sent),
        num_workers=num_workers,
        collate_fn=_unchanged,
        prefetch_factor=PREFETCHED,
        **options,
    )
    for loaded in loader:
        if isinstance(loaded, SteadygazeError):
            raise loaded
        yield sent.popleft(), loaded


def default_num_workers(device: torch.device) -> int:
    """All cores but one if the model is on a GPU, half of them on a CPU; 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores - 1 if device.type != "cpu" else cores // 2))


T = TypeVar("T")
CHECKED = 4  # jobs of an iterator that are compared with what is on disk at a time
READERS = 8  # threads that read files to check their content
NAMED = 5  # replaced images that a warning names


Lacks = Callable[[Iterable[str], tuple[RowKey, ...]], bool]  # whether an image lacks one of these rows


@dataclass(frozen=True)
class Portion:
    """Rows of a job that become known together, and are written at once.

    Attributes:
        work: Units of progress; those that no portion of a job has are counted when the job is done.
        known: They were computed by an earlier run, so no time was spent on them now.
    """

    rows: Sequence[Row]
    work: int = 0
    known: bool = False


Compute = Callable[[Job, T, Lacks], Iterable[Portion]]


@dataclass
class Pace:
    """Seconds that the model worked, and that it waited for images or for the disk."""

    model: float = 0.0
    waiting: float = 0.0

    @property
    def share(self) -> float:
        """Share of the time in the model, 0..1."""
        return self.model / (self.model + self.waiting) if self.model else 0.0


def total_work(jobs: Iterable[Job], world: World) -> int:
    """All units of progress of this process's jobs, with the jobs that they require."""
    own = [job for job in jobs if world.owns(job.batch)]
    return _size(_required(own)) + _size(own)


def _size(jobs: Iterable[Job]) -> int:
    return sum(job.size for job in jobs)


def _required(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that these require, each once, in order."""
    return list({id(job): job for needing in jobs for job in needing.requires}.values())


class Run:
    """A run that is being computed: into a folder that can be resumed, or into memory if `out` is None.

        with Run(out, settings, about, task="verify", unit="images") as run:
            run.execute(jobs, loader, compute)
        rows = run.rows()

    Attributes:
        settings: Everything that defines the numbers; a folder that contains a run with other settings is
            refused.
        about: What does not change the numbers, such as the command.
        task: The name of the run in reports of progress.
        unit: What progress counts.
        total: Units of all jobs of this process, None if unknown.
    """

    def __init__(
        self,
        out: Path | None,
        settings: dict[str, Any],
        about: dict[str, Any],
        *,
        task: str,
        unit: str = "images",
        total: int | None = None,
        world: World | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self.out, self.settings, self.about = out, settings, about
        self.world = world or World()
        self.task, self.unit, self.total, self.on_progress = task, unit, total, on_progress
        self.pace = Pace()
        self.done = Done(None)
        self._finished = self._resumed = self._planned = 0
        self._reported = False
        self._gathered: list[Row] = []
        self._lock = ExitStack()
        self._tally = Tally(self.done)
        self._progress_file: ProgressFile | None = None
        self._store: Store | None = None
        self._prepared: dict[int, Job] = {}  # required jobs that are done, by id
        self._readable: dict[str, bool] = {}  # images that were unreadable in an earlier run, tried again
        self._images: set[str] = set()  # of this shard, all processes
        self._retried: set[str] = set()  # images that were unreadable in an earlier run and can be read now

    def __enter__(self) -> Run:
        if self.out is not None:
            try:
                self._open(self.out)
            except BaseException:
                self._close()
                raise
        return self

    def _open(self, out: Path) -> None:
        if self.world.rank == 0:
            make_folder(out)
            self._lock = lock_run(out, self.world.shard)
        if self.world.local_main:
            prepare(out, self.settings, self.about)
        self.world.wait()
        self._store = Store(out, self.world.label)
        self.world.wait()  # every file is open before any process reads them
        self.done = Done(out, self.world.shard)
        self._tally = Tally(self.done)
        self._progress_file = ProgressFile(out, self.world)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._lock.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._progress_file is not None:
                self._tally.complete |= error is None
                self._progress_file.end(self._tally.counts(), error)
            if error is None:
                self.world.wait()  # the folder is locked until the last process is done
        finally:
            self._close()

    @property
    def resumed(self) -> int:
        """Units of progress that an earlier run into the same folder had done."""
        return self._resumed

    def rows(self) -> Rows:
        """Everything that was computed, by this and by earlier runs into the same folder; of a shard, the
        rows of its images.
        """
        if self.out is None:
            return Rows([{"settings": self.settings, "about": self.about}], self._gathered)
        if self.world.shard:
            return Rows.of_shard(self.out, self.world.shard, self._images)
        return Rows.read(self.out)

    def execute(
        self,
        jobs: Iterable[Job],
        loader: ImageLoader[T],
        compute: Compute[T],
        *,
        num_workers: int = 0,
        processes: bool = False,
    ) -> None:
        """Compute what is missing of this process's jobs.

        Args:
            jobs: A list, or an iterator that is read as the run proceeds, ahead of the model by a few jobs.
            num_workers: Threads, or with `processes` worker processes, that load images ahead of the model.
        """
        todo: Iterable[Job]
        if isinstance(jobs, Sequence):
            todo = self.remaining(jobs, loader)
        else:
            ahead = iter(jobs)
            groups = iter(lambda: list(islice(ahead, CHECKED)), [])
            todo = (job for group in groups for job in self.remaining(group, loader))
        clock = time.perf_counter()
        for job, inputs in load_ahead(loader.load, todo, num_workers, processes=processes):
            clock = self._spent("waiting", clock)
            self._append(self._unreadable_rows(inputs))
            work_left = job.size
            for portion in () if inputs.data is None else compute(job, inputs.data, self.done.any_lacks):
                rows = list(self._new_rows(portion.rows, inputs.content))
                clock = self._spent("model", clock)
                self._append(rows)
                work_left -= portion.work
                self._resumed += portion.work if portion.known else 0
                self._report(portion.work)
                clock = self._spent("waiting", clock)
            clock = self._spent("model", clock)
            self._tally.finish_job(job.images, job.keys)
            self._report(work_left)

    def _spent(self, on: str, since: float) -> float:
        """Add the time since then to the pace; returns the time now."""
        now = time.perf_counter()
        setattr(self.pace, on, getattr(self.pace, on) + now - since)
        return now

    def remaining(self, jobs: Sequence[Job], loader: ImageLoader[T]) -> list[Job]:
        """The jobs of this process that have rows to compute, after the jobs that they require."""
        if self.world.shard:
            self._images |= {i for job in jobs if self.world.shard.owns(job.batch) for i in job.images}
        own = [job for job in jobs if self.world.owns(job.batch)]
        self._forget_replaced(own, loader)
        pending = self._pending(own, loader)
        unfinished = {id(job) for job in pending}
        self._tally.add_jobs((job.images, job.keys, id(job) in unfinished) for job in own)
        self._planned += _size(own) + _size(job for job in _required(own) if id(job) not in self._prepared)
        self._tally.complete = self._planned == self.total
        required = [job for job in _required(pending) if id(job) not in self._prepared]
        todo = [*required, *pending]
        new = [job for job in _required(own) if id(job) not in self._prepared]
        skipped = _size(new) + _size(own) - _size(todo)
        self._resumed += skipped
        self._report(skipped)
        self._prepared |= {id(job): job for job in new}
        return todo

    def read_done(self) -> None:
        """Read what the folder holds, for an estimate of the rest: nothing is locked or written."""
        if self.out is not None and holds_run(self.out, self.settings):
            self.done = Done(self.out)

    def missing(self, job: Job) -> Iterator[tuple[str, RowKey]]:
        """(image, row key) of each row that a remaining job will write, if its images can be read."""
        for image in job.images:
            if image not in self.done.unreadable or image in self._retried:
                yield from ((image, key) for key in job.keys if not self.done.has((image, *key)))

    def _pending(self, jobs: Sequence[Job], loader: ImageLoader[T]) -> list[Job]:
        """The jobs with an image that lacks rows; an image that was unreadable counts if it can be read
        now.
        """
        readable = self._readable

        def wanted(job: Job, image: str) -> bool:
            if not self.done.lacks(image, job.keys):
                return False
            if image in self.done.unreadable and image not in readable:
                readable[image] = loader.readable(job, image)
                if readable[image]:
                    self._retried.add(image)
            return readable.get(image, True)

        return [job for job in jobs if sum(wanted(job, image) for image in job.images)]

    def _forget_replaced(self, jobs: Sequence[Job], loader: ImageLoader[T]) -> None:
        """Recompute images whose content is not that of their rows."""
        computed = {image: job for job in jobs for image in job.images if image in self.done.content}
        if not computed:
            return

        def current(image: str) -> str:
            try:
                return loader.content(computed[image], image)
            except ImageError:
                return ""  # the file is gone, its rows are still true of it

        with ThreadPoolExecutor(READERS) as pool:
            contents = dict(zip(computed, pool.map(current, computed), strict=True))
        replaced = {
            image: content
            for image, content in contents.items()
            if content not in ("", self.done.content[image])
        }
        for image in computed:
            del self.done.content[image]  # checked: no later call asks again
        if not replaced:
            return
        for image in replaced:
            self.done.forget(image)
        if self._store is not None:
            self._store.replace(replaced)
        named = ", ".join(list(replaced)[:NAMED]) + (", ..." if len(replaced) > NAMED else "")
        warnings.warn(
            f"{len(replaced)} image{'s' if len(replaced) > 1 else ''} changed since rows were computed and "
            f"will be computed again: {named}",
            stacklevel=3,
        )

    def _unreadable_rows(self, inputs: Inputs[Any]) -> list[Row]:
        """Lines that record which images could not be read, and which can be read again."""
        known = self.done.unreadable
        failed = {image: why for image, why in inputs.unreadable.items() if known.get(image) != why}
        again = [image for image in inputs.content if image in self._retried]
        for image in again:
            self._retried.discard(image)
            known.pop(image, None)
        known.update(failed)
        return [
            *({"image": image, "unreadable": reason} for image, reason in failed.items()),
            *({"image": image, "unreadable": ""} for image in again),
        ]

    def _new_rows(self, rows: Iterable[Row], content: Mapping[str, str]) -> Iterator[Row]:
        for row in rows:
            if not self.done.has(key_of(row)):
                yield {**row, "content": content[row["image"]]}

    def _append(self, rows: list[Row]) -> None:
        self._tally.add_rows(rows)
        if rows and self._store is not None:
            self._store.append(rows)
        elif rows:
            self._gathered.extend(rows)

    def _report(self, units: int) -> None:
        if units or not self._reported:
            self._reported = True
            self._finished += units
            progress = Progress(self.task, self._finished, self.total, self.unit, resumed=self._resumed)
            if self._progress_file is not None:
                self._progress_file.report(progress, self._tally.counts)
            self.on_progress(progress)


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[T]):
    """A run that is checked, with nothing computed yet; `verify` and `stress` say what a batch becomes.

    Attributes:
        loaded: The model with its preprocessing and names; None for a bare module.
        identity: The model in a row.
        settings: Everything that defines the numbers.
        about: What run.json records besides.
    """

    task: ClassVar[str]
    unit: ClassVar[str] = "images"
    processes: ClassVar[bool] = False  # images are loaded by worker processes, not by threads

    request: Request
    loaded: LoadedModel | None
    source: Source
    loader: ImageLoader[T]
    identity: dict[str, str]
    settings: dict[str, Any]
    about: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        raise NotImplementedError

    def jobs_of(self, images: tuple[RunImage, ...], number: int) -> Iterable[Job]:
        """The jobs of a batch."""
        raise NotImplementedError

    def compute(self, job: Job, data: T, lacks: Lacks) -> Iterable[Portion]:
        """The rows of a job, as they become known."""
        raise NotImplementedError

    def trial(self, job: Job) -> tuple[Job, float, str]:
        """What a dry run times in place of a job, by how much the job costs more, and what is assumed."""
        return job, 1.0, ""

    def work(self, world: World) -> int | None:
        """Units of progress of this process; None if unknown."""
        raise NotImplementedError

    def groups(self) -> Iterator[Iterable[Job]]:
        """Jobs, group by group: a folder all at once, memory batch by batch, a stream as it comes."""
        for batches in self.source.groups():
            jobs = (job for number, images in batches for job in self.jobs_of(images, number))
            yield list(jobs) if isinstance(batches, Sequence) else jobs

    def jobs(self) -> list[Job]:
        """All jobs of a run over files, listed."""
        return [job for group in self.groups() for job in group]

    @property
    def num_workers(self) -> int:
        """Threads or processes that load images ahead of the model."""
        if self.request.num_workers is not None:
            return self.request.num_workers
        return 0 if self.request.in_memory else default_num_workers(self.device)

    def reporting(self, on_progress: OnProgress) -> AbstractContextManager[None]:
        """A context in which the methods report their own progress."""
        return nullcontext()

    def after_group(self, number: int, jobs: Iterable[Job], world: World) -> None:
        """Called when the rows of a group are written."""

    def after_run(self, run: Run, rows: Rows, world: World) -> None:
        """Called when all rows are written."""

    def run(
        self, world: World | None, on_progress: OnProgress = ignore_progress, pace: Pace | None = None
    ) -> Rows:
        """Compute the rows that are missing; all rows of the run."""
        world = (world or World()).of_shard(self.request.shard)
        run = Run(
            self.request.out,
            self.settings,
            self.about,
            task=self.task,
            unit=self.unit,
            total=self.work(world),
            world=world,
            on_progress=on_progress,
        )
        run.pace = pace or run.pace
        with run, self.reporting(on_progress):
            for number, jobs in enumerate(self.groups()):
                run.execute(
                    jobs, self.loader, self.compute, num_workers=self.num_workers, processes=self.processes
                )
                self.after_group(number, jobs, world)
        for damage in self.source.damaged:
            warnings.warn(damage, DamagedDataWarning, stacklevel=3)
        rows = run.rows()
        self.after_run(run, rows, world)
        return rows
