"""Interleaved timing: all candidates are timed in every round, so that a busy machine slows all alike."""

import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def ratios(
    unit: Callable[[], Any], candidates: dict[str, Callable[[], Any]], rounds: int = 5
) -> dict[str, tuple[float, float]]:
    """(median seconds, median ratio to `unit`, timed before and after) of each candidate, over all rounds."""
    for run in (unit, *candidates.values()):
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    parts: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            before = [_time(unit) for _ in range(3)]
            taken = _time(run)
            base = statistics.median(
                before + [_time(unit) for _ in range(3)]
            )  # one short run alone can be off by a fifth
            seconds[name].append(taken)
            parts[name].append(taken / base)
    return {name: (statistics.median(seconds[name]), statistics.median(parts[name])) for name in candidates}


def _time(run: Callable[[], Any]) -> float:
    gc.collect()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def spread(each: np.ndarray, repeats: int = 2000) -> tuple[float, float, float]:
    """Mean of (seeds, images), and its 95 % interval: seeds and images drawn anew."""
    rng = np.random.default_rng(0)
    seeds, images = each.shape
    drawn = [
        each[rng.integers(seeds, size=seeds)][:, rng.integers(images, size=images)].mean()
        for _ in range(repeats)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(each.mean()), float(low), float(high)


def peak_memory(function: Callable[..., Any], *args: Any) -> float:
    """MiB that the call `function(*args)()` adds at its peak, in a separate process. Linux only.

    `function(*args)` prepares the call and is not measured.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (function, args))


def _peak(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    run = function(*args)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
    before = _held("VmRSS")
    run()
    return (_held("VmHWM") - before) / 1024


def _held(what: str) -> int:
    """KiB of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what + ":"))
