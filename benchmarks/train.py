"""What a step costs against the plain one: python -m benchmarks.train [--model NAME] [--batch N] [--rounds N]
[--memory] [--epochs]

Every candidate is a whole step (forward, backward, optimizer) and is timed in turn with the plain step, round
after round, so that a busy machine slows both alike; the median ratio counts. --cpu counts the processor's
seconds instead of the clock's: on a machine that is shared with much else. Random weights and images: they
do not change the cost. Memory is what a step adds at its peak, each in a process of its own (Linux).

--epochs measures the loop of `steadygaze train` instead, on JPEG files that it writes into a temporary
folder: an epoch of a linear probe against one of fine-tuning, and the share of the time that fine-tuning with
two workers spends in the model.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks import measure
from steadygaze.training.loop import TrainingRun
from steadygaze.training.objective import Objective
from steadygaze.training.recipe import Recipe, make_recipe

PLAIN: dict[str, Any] = {"cross_entropy": {}}
CANDIDATES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {  # losses, modules, goal
    "CB": (PLAIN, {"cb": {}}, 1.02),
    "CB as identity": (PLAIN, {"cb": {"start": "identity"}}, 1.02),
    "CB scaled": (PLAIN, {"cb": {"variant": "scaled"}}, 1.02),
    "TAP": (PLAIN, {"tap": {}}, 1.10),
    "TAP as identity": (PLAIN, {"tap": {"start": "identity"}}, 1.10),
    "ADL": ({"cross_entropy": {}, "adl": {}}, {}, 1.08),
    "TAP and ADL": ({"cross_entropy": {}, "adl": {}}, {"tap": {}}, 1.18),
    "relevance by rollout": ({"relevance": {"method": "rollout"}}, {}, 1.35),
    "relevance by GAE": ({"relevance": {}}, {}, 1.6),
    "relevance by GAE to second order": ({"relevance": {"second_order": True}}, {}, None),
    "GradMask": ({"gradmask": {}}, {}, None),
}


def step(name: str | None, model: str, batch: int, threads: int) -> Callable[[], None]:
    """A training step of one candidate; None is the plain one."""
    from steadygaze import modules

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    losses, asked, _ = (PLAIN, {}, None) if name is None else CANDIDATES[name]
    net = timm.create_model(model, num_classes=1000)
    if asked:
        net = modules.insert(
            net,
            **{key: {"cb": modules.CB, "tap": modules.TAP}[key](**options) for key, options in asked.items()},
        )
    options = make_recipe({"model": {"name": model}, "losses": losses}).losses
    objective = Objective(net, options).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    side = timm.get_pretrained_cfg_value(model, "input_size")[-1]
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    masks = torch.zeros(batch, side, side, dtype=torch.uint8)
    masks[:, side // 4 : side // 2, side // 4 :] = 1

    def run() -> None:
        optimizer.zero_grad()
        objective(images, labels, None, masks)[0].backward()
        optimizer.step()

    return run


def epoch(recipe: Recipe, folder: Path) -> tuple[float, float]:
    """Seconds of one epoch of the training loop without its files, and those of them inside steps."""
    run = TrainingRun(recipe, folder, "cpu")
    try:
        run._begin()
        if run.head_name is not None:
            run._cache_features()
        run.parallel_objective.train()
        steps = run._remaining_steps()
        run.train_step(next(steps))  # the first step allocates, and waits for the workers to start
        began, inside = time.perf_counter(), 0.0
        for micro_batches in steps:
            before = time.perf_counter()
            run.train_step(micro_batches)
            inside += time.perf_counter() - before
        return time.perf_counter() - began, inside
    finally:
        run.close()


def epochs(options: argparse.Namespace) -> None:
    """Print an epoch of a linear probe against one of fine-tuning, and the share of steps in the latter."""
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.images):
            file = folder / "data" / str(number % 2) / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((500, 375)).save(file, quality=90)
        given = {
            "model": {"name": options.model, "num_classes": 2},
            "data": {"train": str(folder / "data"), "workers": 2},
            "batch": options.batch,
            "epochs": 1,
            "tensorboard": False,
        }
        whole, inside = epoch(make_recipe(given), folder / "all")
        head, _ = epoch(make_recipe({**given, "train": "head"}), folder / "head")
    where = f"{options.model}, {options.images} images, batch {options.batch}, {options.threads} thread(s)"
    print(f"{where}, load {os.getloadavg()[0]:.1f}")
    print(f"epoch of fine-tuning: {whole:.2f} s, {100 * inside / whole:.1f} % of it in steps (two workers)")
    print(f"epoch of a linear probe: {head:.4f} s, {100 * head / whole:.2f} % of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="names between commas")
    parser.add_argument("--cpu", action="store_true", help="count processor seconds, not the clock's")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--epochs", action="store_true", help="measure the loop and the linear probe")
    parser.add_argument("--images", type=int, default=160, help="of --epochs")
    options = parser.parse_args()
    if options.epochs:
        epochs(options)
        return
    names = [name.strip() for name in options.only.split(",") if name.strip()] or list(CANDIDATES)
    given = (options.model, options.batch, options.threads)
    unit = step(None, *given)
    if options.cpu:
        measure.time.perf_counter = time.process_time
    found = measure.ratios(unit, {name: step(name, *given) for name in names}, options.rounds)
    memory = (
        {name: measure.peak_memory(step, name, *given) for name in (None, *names)} if options.memory else {}
    )
    where = (
        f"{options.model}, batch {options.batch}, {options.threads} thread(s), load {os.getloadavg()[0]:.1f}"
    )
    table = Table("step", "seconds", "times the plain step", "goal", "MiB at the peak", "times", title=where)
    if memory:
        table.add_row("plain", "", "1", "", f"{memory[None]:.0f}", "1")
    for name in names:
        seconds, ratio = found[name]
        goal = CANDIDATES[name][2]
        extra = [f"{memory[name]:.0f}", f"{memory[name] / memory[None]:.2f}"] if memory else ["", ""]
        table.add_row(name, f"{seconds:.2f}", f"{ratio:.3f}", "" if goal is None else f"{goal}", *extra)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
