"""Speed of `verify` on several one-thread processes against one: part of `python -m benchmarks.verify`.

    python -m benchmarks.verify --processes 2 [--images N] [--model NAME] [--rounds N]

Each process is a shard (`--shard I/N`) of one run into one folder, as on a cluster: images are read from
files, rows are written. Loading of the model and a warm-up are not timed. In each round, one process does the
whole run, then N processes do it together, and between them the same is done with plain forward passes,
which is what the machine itself gains from N processes: memory bandwidth, clock rate and other load limit
both alike. A run ends with its sample images for the report, about 2 CPU seconds that no process saves: small
runs gain less.
"""

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import steadygaze as sg

GOAL = 1.8
METHODS = ["gaze_removal", "gae"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PASSES = 60  # forward passes of one image in the comparison


class Times(NamedTuple):
    """Seconds of the slowest process, and CPU seconds of all."""

    wall: float
    cpu: float


def main(model: str, images: int, processes: int, rounds: int, console: Console) -> None:
    """Print the table and whether the goal was met."""
    with tempfile.TemporaryDirectory() as folder:
        data = _make_images(Path(folder) / "data", images)
        seconds: dict[tuple[str, int], list[Times]] = {}
        for turn in range(rounds):
            for work in ("verify", "forward"):
                for count in (1, processes):
                    out = Path(folder) / f"run-{turn}-{count}"
                    seconds.setdefault((work, count), []).append(_timed(work, model, data, out, count))
        _check_same_rows(Path(folder), processes)
    table = Table(
        "work",
        "processes",
        "seconds",
        "CPU seconds of all",
        title=f"{model}, {images} images, {', '.join(METHODS)}; one thread each; median of {rounds} rounds",
    )
    for (work, count), times in seconds.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        table.add_row(work, str(count), f"{wall:.1f}", f"{cpu:.1f}")
    console.print(table)
    gains = {work: _gain(seconds[work, 1], seconds[work, processes]) for work in ("verify", "forward")}
    verdict = "held" if gains["verify"] >= GOAL else "MISSED"
    console.print(
        f"verify: {gains['verify']:.2f} times as fast with {processes} processes; plain forward passes: "
        f"{gains['forward']:.2f} times. Goal: {GOAL} times with 2 processes on 2 idle cores: {verdict}."
    )


def _gain(one: list[Times], several: list[Times]) -> float:
    """Median over rounds: both runs of a round are timed next to each other."""
    return statistics.median(a.wall / b.wall for a, b in zip(one, several, strict=True))


def _make_images(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(path)
    return folder


def _timed(work: str, model: str, data: Path, out: Path, count: int) -> Times:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(count), context.Queue()
    workers = [
        context.Process(target=_work, args=(work, model, data, out, (index, count), ready, results))
        for index in range(count)
    ]
    for worker in workers:
        worker.start()
    times = [results.get(timeout=3600) for _ in workers]
    for worker in workers:
        worker.join()
    return Times(max(t.wall for t in times), sum(t.cpu for t in times))


def _work(
    work: str, model: str, data: Path, out: Path, shard: tuple[int, int], ready: Barrier, results: Any
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = timm.create_model(model, num_classes=10).eval()
    loaded = sg.load_model(module, image_size=module.patch_embed.img_size[0], mean=MEAN, std=STD)
    image = torch.zeros(1, *sg.adapt(loaded).plan.input_size)
    sg.verify(loaded, [(image, torch.zeros(1, dtype=torch.long))], methods=METHODS)  # warm-up
    ready.wait(timeout=600)
    began, cpu = time.perf_counter(), time.process_time()
    if work == "verify":
        sg.verify(loaded, data, methods=METHODS, batch_size=4, out=out, shard=shard)
    else:
        with torch.no_grad():
            for _ in range(PASSES // shard[1]):
                module(image)
    results.put(Times(time.perf_counter() - began, time.process_time() - cpu))


def _check_same_rows(folder: Path, processes: int) -> None:
    one, several = (_rows(folder / f"run-0-{count}") for count in (1, processes))
    assert one == several, "shards changed the rows"


def _rows(out: Path) -> list[str]:
    return sorted(line for file in out.glob("rows*") for line in file.read_text().splitlines())
