"""Measuring side by side: every candidate is timed in turn, round after round, so that a busy machine slows all alike."""

import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any


def ratios(unit: Callable[[], Any], candidates: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, tuple[float, float]]:
    """(median seconds, median ratio to `unit` timed just before) of each candidate, over interleaved rounds."""
    for run in (unit, *candidates.values()):
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    parts: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            base = _time(unit)
            taken = _time(run)
            base = (base + _time(unit)) / 2
            seconds[name].append(taken)
            parts[name].append(taken / base)
    return {name: (statistics.median(seconds[name]), statistics.median(parts[name])) for name in candidates}


def _time(run: Callable[[], Any]) -> float:
    gc.collect()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def peak_memory(function: Callable[..., Any], *args: Any) -> float:
    """MiB that `function(*args)` adds at its peak over what `function(*args, prepare=True)` holds, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (function, args))


def _peak(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    run = function(*args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
