"""Loading the images of later jobs while the model works on earlier ones, in threads or in worker
processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from steadygaze.errors import SteadygazeError

J = TypeVar("J")
T = TypeVar("T")
PREFETCHED = 4  # jobs that each worker process loads ahead


def load_ahead(
    load: Callable[[J], T], jobs: Sequence[J], num_workers: int = 0, *, processes: bool = False
) -> Iterator[T]:
    """`load(job)` of every job, in order.

    num_workers: threads or worker processes that load ahead; 0: each job is loaded when its turn comes
    """
    if not jobs:
        return
    if not num_workers:
        yield from map(load, jobs)
    elif processes:
        yield from _in_processes(load, jobs, num_workers)
    else:
        yield from _in_threads(load, jobs, num_workers)


def _in_threads(load: Callable[[J], T], jobs: Sequence[J], num_workers: int) -> Iterator[T]:
    pool = ThreadPoolExecutor(num_workers)
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(load, job))
            if len(waiting) > num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Jobs(Dataset[Any], Generic[J, T]):
    """The jobs as a torch data set. Errors are returned, to be raised without the worker's traceback text."""

    def __init__(self, load: Callable[[J], T], jobs: Sequence[J]) -> None:
        self.load, self.jobs = load, jobs

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, index: int) -> T | SteadygazeError:
        try:
            return self.load(self.jobs[index])
        except SteadygazeError as error:
            return error


def _unchanged(loaded: Any) -> Any:
    return loaded


def _in_processes(load: Callable[[J], T], jobs: Sequence[J], num_workers: int) -> Iterator[T]:
    options: dict[str, Any] = {"generator": torch.Generator()}  # the global random state stays as it was
    if sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods():
        options["multiprocessing_context"] = "fork"  # starts at once; the workers use no GPU
    loader = DataLoader(
        _Jobs(load, jobs),
        batch_size=None,
        shuffle=False,
        num_workers=num_workers,
        collate_fn=_unchanged,
        prefetch_factor=PREFETCHED,
        **options,
    )
    for loaded in loader:
        if isinstance(loaded, SteadygazeError):
            raise loaded
        yield loaded


def default_num_workers(device: torch.device) -> int:
    """All cores but one if the model is on a GPU, half of them on a CPU; 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores - 1 if device.type != "cpu" else cores // 2))
