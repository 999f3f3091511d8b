"""The page under load: users that call it all at once, each with an image of its own.

    python -m benchmarks.page --users 50 --minutes 5

Starts `steadygaze app` with the embedded model in a process of its own. Every user uploads its image, then
explains it, verifies the map and removes patches, again and again, without a pause. Its answers must be those
for its own image, computed beforehand without the page: another answer counts as cross-talk. Prints calls,
errors, cross-talk, the memory of the server over time and percentiles of the time to an answer. Linux only.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
from PIL import Image

import steadygaze as sg
from benchmarks.page_client import DEFAULT_SCORE, PREDICTED, Answer, Visitor
from steadygaze.app.viewer import Viewer

METHODS = ["gaze_removal", "gae"]
SHARE = 25  # percent of the patches that are removed
TOLERANCE = 1e-4  # of probabilities; those of two users' images differ by more


@dataclass
class Results:
    """What all users saw, and the memory of the server: (seconds, MiB)."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    crosstalk: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class User:
    """A user, its image, and the answers it expects."""

    file: Path
    predictions: dict[str, float]
    summary: str
    row: list[str]

    @classmethod
    def make(cls, number: int, folder: Path, viewer: Viewer) -> User:
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        file = folder / f"user{number}.png"
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).save(file)
        maps = viewer.maps(file, METHODS)
        first = maps[METHODS[0]]
        top, _ = viewer.split(first, SHARE / 100)
        curves = viewer.removal_curves(file, maps)[0]
        row = [curves.method, *(f"{value:.1f}" for value in curves.scores.values())]
        return cls(file, viewer.predictions(file), viewer.summary(file, top), row)

    def work(self, address: str, end: float, results: Results) -> None:
        """Call the page until the time is over."""
        visitor = Visitor(address)
        while time.monotonic() < end:
            try:
                image = visitor.upload(self.file)
            except httpx.HTTPError as error:
                results.errors[repr(error)] += 1
                continue
            request = (image, METHODS, PREDICTED, DEFAULT_SCORE)
            for function, more in (
                ("explain", (False, True)),
                ("verify", ()),
                ("remove_top", (SHARE, False)),
            ):
                self.call(visitor, function, (*request, *more), results)

    def call(self, visitor: Visitor, function: str, inputs: tuple[Any, ...], results: Results) -> None:
        begin = time.monotonic()
        try:
            answer = visitor.call(function, *inputs)
        except httpx.HTTPError as error:
            answer = Answer(error=repr(error))
        results.seconds.append(time.monotonic() - begin)
        if answer.error is not None:
            results.errors[answer.error] += 1
        elif not self.is_mine(function, answer.data):
            results.crosstalk += 1

    def is_mine(self, function: str, data: list[Any]) -> bool:
        """Whether this is the answer for this user's image."""
        if function == "verify":
            rows: list[list[str]] = data[-1]["data"]
            numbers = zip(rows[0][1:], self.row[1:], strict=True)
            return rows[0][0] == self.row[0] and all(abs(float(a) - float(b)) < 0.11 for a, b in numbers)
        if function == "remove_top":
            return bool(data[-1] == self.summary)
        confidences = {entry["label"]: entry["confidence"] for entry in data[0]["confidences"]}
        return all(abs(self.predictions[name] - value) < TOLERANCE for name, value in confidences.items())


@contextmanager
def served(users: int) -> Iterator[tuple[str, int]]:
    """`steadygaze app` in a process of its own: its address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "steadygaze", "app", "--port", str(port)]
    # all users have the address of this machine
    command += ["--max-calls-per-client", str(users), "--max-calls", str(2 * users)]
    address = f"http://127.0.0.1:{port}/"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(address, process)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)


def wait_for(address: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Return as soon as the page answers."""
    for _ in range(int(seconds)):
        if process.poll() is not None:
            raise SystemExit(f"steadygaze app ended with exit code {process.returncode}")
        try:
            httpx.get(address)
            return
        except httpx.HTTPError:
            time.sleep(1)
    raise SystemExit(f"steadygaze app did not answer within {seconds:.0f} s")


def resident(pid: int) -> float:
    """MiB that a process holds in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(users: int, minutes: float) -> Results:
    """Let the users work for some minutes."""
    results, viewer = Results(), Viewer(sg.load_model("embedded"))
    with tempfile.TemporaryDirectory() as folder, served(users) as (address, pid):
        everyone = [User.make(number, Path(folder), viewer) for number in range(users)]
        assert len({tuple(user.predictions.values()) for user in everyone}) == users
        begin = time.monotonic()
        end = begin + 60 * minutes
        threads = [Thread(target=user.work, args=(address, end, results)) for user in everyone]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            results.memory.append((time.monotonic() - begin, resident(pid)))
            time.sleep(min(10.0, 6 * minutes))
        for thread in threads:
            thread.join()
        results.memory.append((time.monotonic() - begin, resident(pid)))
    return results


def show(results: Results) -> None:
    calls = len(results.seconds)
    print(f"{calls} calls, {sum(results.errors.values())} errors, {results.crosstalk} with another's answer")
    for error, count in results.errors.most_common(5):
        print(f"  {count} x {error}")
    p50, p90, p99 = np.percentile(results.seconds, [50, 90, 99])
    print(f"response time in seconds: median {p50:.1f}, 90 % {p90:.1f}, 99 % {p99:.1f}")
    print("memory of the server, MiB, after seconds:")
    print("  " + ", ".join(f"{seconds:.0f} s: {mib:.0f}" for seconds, mib in results.memory))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=5.0)
    given = parser.parse_args()
    show(measure(given.users, given.minutes))
