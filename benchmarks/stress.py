"""How long does the model wait for its images in a stress run?

    python -m benchmarks.stress [--model NAME] [--images N] [--workers 0,1,2] [--threads N]

A run of all 15 corruptions at severities 1, 3 and 5 over generated JPEG images, in a folder and in WebDataset
shards, with random weights, which do not change the cost. For each kind of data and number of workers: the
share of the run that is spent in the model (goal: 95 %), images per second, and the duration of the run if
the model never waited. Where the model occupies all cores, workers slow it down: compare the seconds, too.
With --device cuda the cores are free.
"""

import argparse
import os
import tempfile
import time
from itertools import product
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.loading import generated
from steadygaze.runs.loop import Pace
from steadygaze.runs.request import StressRequest
from steadygaze.runs.shards import World
from steadygaze.runs.stress import prepare_stress, run_stress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--threads", type=int, default=1, help="of the model, on a CPU")
    parser.add_argument("--corruptions", default="all15")
    parser.add_argument("--severities", default="1,3,5")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{options.threads} thread(s), {cores} cores, load {os.getloadavg()[0]:.1f}"
    title = f"{options.model}, {options.device}, {machine}"
    table = Table(
        "data", "workers", "share in the model", "seconds", "in the model", "images a second", title=title
    )
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        torch.manual_seed(0)
        save_file(timm.create_model(options.model).state_dict(), root / "random.safetensors")
        kinds = generated(root, options.images)
        how = {
            "checkpoint": root / "random.safetensors",
            "batch_size": options.batch,
            "options": {"corruptions": options.corruptions, "severities": options.severities},
            "device": options.device,
        }
        for kind, workers in product(kinds, map(int, options.workers.split(","))):
            request = StressRequest(
                model=options.model,
                data=kinds[kind],
                out=root / f"{kind}{workers}",
                suites=["corruptions"],
                num_workers=workers,
                **how,
            )
            ready, pace = prepare_stress(request), Pace()
            began = time.perf_counter()
            run_stress(request, prepared=ready, pace=pace)
            taken = time.perf_counter() - began
            shown = ready.work(World())
            table.add_row(
                kind,
                str(workers),
                f"{100 * pace.model / taken:.0f} %",
                f"{taken:.1f}",
                f"{pace.model:.1f}",
                f"{shown / taken:.1f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
