"""Seconds, forward passes and memory of a piece of a run, measured on a few images.

A piece is measured with one image first, which warms up, then with as many images of each of two batches as
fit into the time that is allowed. Forward passes grow linearly: some for each batch, some for each image.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from steadygaze.runs.cost.counting import PassCounter

T = TypeVar("T")
MANY = 0.2  # seconds; shorter pieces are timed several times
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """What a piece costs.

    passes_a_batch, passes: forward passes of each batch, and of each image
    seconds: of each image
    memory: bytes that a whole batch adds at its peak
    """

    passes_a_batch: float = 0.0
    passes: float = 0.0
    seconds: float = 0.0
    memory: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(
            self.passes_a_batch + other.passes_a_batch,
            self.passes + other.passes,
            self.seconds + other.seconds,
            max(self.memory, other.memory),
        )

    def times(self, factor: float) -> Cost:
        """So many times, one after the other."""
        return replace(
            self,
            passes_a_batch=self.passes_a_batch * factor,
            passes=self.passes * factor,
            seconds=self.seconds * factor,
        )


@dataclass(frozen=True)
class Sample:
    """One measured call."""

    result: Any
    passes: float
    seconds: float
    memory: float


class Meter:
    """Measures calls that run one model.

    allowed: seconds for each piece, about
    """

    def __init__(self, counter: PassCounter | None, device: torch.device, allowed: float = 4.0) -> None:
        self.counter, self.device, self.allowed = counter, device, allowed

    def sample(self, call: Callable[[], T]) -> Sample:
        """Call once."""
        before = 0.0 if self.counter is None else self.counter.total
        held = reset_peak(self.device)
        began = time.perf_counter()
        if self.counter is None:
            result = call()
        else:
            with self.counter.counting():
                result = call()
        synchronize(self.device)
        seconds = time.perf_counter() - began
        passes = 0.0 if self.counter is None else self.counter.total - before
        return Sample(result, passes, seconds, max(0.0, peak(self.device) - held))

    def cost(
        self, inputs: Callable[[int, int], T], run: Callable[[T], Any], batch_size: int, batches: int = 2
    ) -> Cost:
        """The cost of run(inputs(batch, images)), for batches 0 .. `batches` - 1 of `batch_size` images.

        inputs: what the piece is given; not measured
        """

        def sample(number: int, images: int) -> Sample:
            return self.sample(partial(run, inputs(number, images)))

        sample(0, 1)  # caches of the libraries, and what is made once for a model
        one = sample(0, 1)
        images = min(batch_size, max(2, int(self.allowed / batches / max(one.seconds, 1e-9))))
        timed: list[Sample] = []
        for number in list(range(batches)) * REPEATS:
            timed.append(sample(number, images))
            if len(timed) >= batches and sum(sample.seconds for sample in timed) > MANY:
                break
        seconds = sum(sample.seconds for sample in timed) / len(timed) / images
        many = timed[-1]
        for_batch = 0.0 if images == 1 else (images * one.passes - many.passes) / (images - 1)
        for_batch = 0.0 if abs(for_batch) < 1e-6 * max(1.0, one.passes) else for_batch
        memory = max(sample.memory for sample in timed) * batch_size / images
        return Cost(for_batch, one.passes - for_batch, seconds, memory)


def mean_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one of these calls, on the CPU; the first is called once before."""
    calls[0]()
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def reset_peak(device: torch.device) -> float:
    """Let the peak begin anew; the bytes that are held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # elsewhere the peak is that of the process so far
            Path("/proc/self/clear_refs").write_text("5")
    return held(device)


def held(device: torch.device) -> float:
    """The bytes that are held now: of the GPU, or of this process."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    return _status("VmRSS")


def peak(device: torch.device) -> float:
    """The largest number of bytes held since `reset_peak`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def _status(what: str) -> float:
    """Bytes of this process: VmRSS now, VmHWM at the peak; without /proc, the peak so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))
