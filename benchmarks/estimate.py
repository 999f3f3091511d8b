"""Is the estimate of `--dry-run` right? Small runs are estimated, then executed.

    python -m benchmarks.estimate [--images N] [--model NAME] [--only WORD]

Prints estimated and real rows and seconds, and the ratio of the seconds. Both happen in this process, one
after the other: on a busy machine the load changes between them, and the ratio with it. The real runs also
make the sample images of their reports, which no estimate has: with few images they show in the ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import steadygaze as sg
from steadygaze.runs.estimate import Estimate, estimate_run, estimate_train
from steadygaze.runs.request import StressRequest
from steadygaze.runs.stress import prepare_stress, run_stress
from steadygaze.runs.verify import prepare_verify, run_verify
from steadygaze.training.recipe import make_recipe

GOAL = 0.25
Measured = tuple[int, float]  # rows, seconds
VERIFY = {
    "default method and metrics": {},
    "six methods": {"methods": ["gae", "cat", "gaze", "rollout", "decompx", "gradcam"]},
    "a search": {"methods": ["gae", "rise:budget=200"], "metrics": ["deletion_aopc"]},
    "painted pixels": {"methods": ["gae"], "metrics": ["positive_perturbation", "positive_kl"]},
    "sanity": {"methods": ["gae", "gaze"], "metrics": ["randomization", "class_sensitivity"]},
}
STRESS = {
    "15 corruptions": ("corruptions", {"severities": "1,5"}),
    "sequences": ("sequences", {}),
    "attacks, tokens, attention": ("attacks,occlusion,attention", {"severities": "3"}),
}


def image_folder(folder: Path, images: int) -> Path:
    """Labeled PNG files in the ten classes of the embedded model."""
    rng = np.random.default_rng(0)
    names = sg.load_model("embedded").class_names or ()
    for number in range(images):
        path = folder / names[number % len(names)] / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (96, 128, 3), dtype=np.uint8)).save(path)
    return folder


def timed(run: Callable[[], int]) -> Measured:
    """Execute; run: returns its number of rows."""
    began = time.perf_counter()
    rows = run()
    return rows, time.perf_counter() - began


def verify_case(name: str, model: str, data: Path, out: Path) -> tuple[Estimate, Measured]:
    request = VerifyRequest(random=False, model=model, data=data, out=out, **VERIFY[name])
    found = estimate_run(request)
    ready = prepare_verify(request)
    return found, timed(lambda: len(run_verify(request, prepared=ready)))


def stress_case(name: str, model: str, data: Path, out: Path) -> tuple[Estimate, Measured]:
    suites, options = STRESS[name]
    request = StressRequest(model=model, data=data, out=out, suites=suites, options=options)
    found = estimate_run(request)
    ready = prepare_stress(request)
    return found, timed(lambda: len(run_stress(request, prepared=ready)))


def train_case(data: Path, out: Path) -> tuple[Estimate, Measured]:
    recipe = make_recipe(
        {
            "model": {"name": "vit_tiny_patch16_224", "arguments": {"img_size": 64, "depth": 6}},
            "data": {"train": str(data), "test": str(data)},
            "epochs": 3,
            "batch": 16,
            "tensorboard": False,
        }
    )
    found = estimate_train(recipe, out, device="cpu")
    rows, seconds = timed(lambda: len(sg.train(recipe, out, device="cpu").log))
    return found, (rows, seconds - found.startup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--only", default="", help="only cases whose name contains this word")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    columns = ("case", "rows", "seconds", "ratio of seconds")
    threads = torch.get_num_threads()
    title = f"estimated / real; {options.model}, {options.images} images, {threads} thread(s)"
    table = Table(*columns, title=title)
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = image_folder(folder / "data", options.images)
        cases: dict[str, Callable[[Path], tuple[Estimate, Measured]]] = {
            **{f"verify: {n}": lambda out, n=n: verify_case(n, options.model, data, out) for n in VERIFY},
            **{f"stress: {n}": lambda out, n=n: stress_case(n, options.model, data, out) for n in STRESS},
            "train": lambda out: train_case(data, out),
        }
        for number, (name, case) in enumerate(cases.items()):
            if options.only not in name:
                continue
            found, (rows, seconds) = case(folder / str(number))
            ratio = found.seconds / seconds
            ratios.append(ratio)
            table.add_row(
                name,
                f"{found.rows_left} / {rows}",
                f"{found.seconds:.1f} / {seconds:.1f}",
                f"{ratio:.2f}",
            )
            print(f"{name}: {ratio:.2f}", flush=True)
    Console(width=140).print(table)
    held = sum(abs(ratio - 1) <= GOAL for ratio in ratios)
    print(f"Goal: within {GOAL:.0%} on a quiet machine. Held in {held} of {len(ratios)} cases.")


if __name__ == "__main__":
    main()
