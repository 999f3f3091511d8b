"""Loading the images of later jobs while the model works on earlier ones, in threads or in worker
processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from steadygaze.errors import SteadygazeError

J = TypeVar("J")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
J_contra = TypeVar("J_contra", contravariant=True)
PREFETCHED = 4  # jobs that each worker process loads ahead


@dataclass(frozen=True)
class Inputs(Generic[T_co]):
    """What loading a job gives.

    data: for the function that computes; None if no image of the job could be read
    content: image -> content hash, for each image that was read
    unreadable: image -> reason
    """

    data: T_co | None
    content: Mapping[str, str]
    unreadable: Mapping[str, str] = field(default_factory=dict)


class Loader(Protocol[J_contra, T_co]):
    """Reads the images of a job. It is pickled for worker processes where a platform has no fork."""

    def load(self, job: J_contra) -> Inputs[T_co]:
        """The images of a job, ready for the model."""
        ...

    def readable(self, job: J_contra, image: str) -> bool:
        """Whether an image that could not be read in an earlier run can be read now."""
        ...

    def content(self, job: J_contra, image: str) -> str:
        """The content hash of an image as it is now; may raise `BadImage`. "" if there is no way to know."""
        ...


def load_ahead(
    load: Callable[[J], T], jobs: Iterable[J], num_workers: int = 0, *, processes: bool = False
) -> Iterator[tuple[J, T]]:
    """Every job with `load(job)`, in order.

    jobs: an iterator is read a few jobs ahead, and not before worker processes have started
    num_workers: threads or worker processes that load ahead; 0: each job is loaded when its turn comes
    """
    if isinstance(jobs, Sequence) and not jobs:
        return
    if not num_workers:
        yield from ((job, load(job)) for job in jobs)
    elif processes:
        yield from _in_processes(load, jobs, num_workers)
    else:
        yield from _in_threads(load, jobs, num_workers)


def _in_threads(load: Callable[[J], T], jobs: Iterable[J], num_workers: int) -> Iterator[tuple[J, T]]:
    pool = ThreadPoolExecutor(num_workers)
    waiting: deque[tuple[J, Future[T]]] = deque()
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


class _Jobs(Dataset[Any], Generic[J, T]):
    """The jobs as a torch data set. Errors are returned, to be raised without the worker's traceback text.

    jobs: a list, which workers inherit, so that an index selects a job. Without one, a job is its own index.
    """

    def __init__(self, load: Callable[[J], T], jobs: Sequence[J] | None) -> None:
        self.load, self.jobs = load, jobs

    def __getitem__(self, index: Any) -> T | SteadygazeError:
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


def _in_processes(load: Callable[[J], T], jobs: Iterable[J], num_workers: int) -> Iterator[tuple[J, T]]:
    options: dict[str, Any] = {"generator": torch.Generator()}  # the global random state stays as it was
    if sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods():
        options["multiprocessing_context"] = "fork"  # starts at once; the workers use no GPU
    sent: deque[J] = deque()
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
