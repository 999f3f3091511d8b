"""Speed and memory of token removal, in forward passes.

    python -m benchmarks.verify [--model NAME] [--rounds N] [--threads N]
    python -m benchmarks.verify --processes 2 [--images N]      # see benchmarks/processes.py

Unit: one forward pass of the model without gradients on the same images, timed just before and after. Weights
and maps are random: they do not change the cost. Measured: insertion and deletion, accuracy and AOPC, at nine
ratios, which is 18 passes with half of the tokens on average. For comparison: the same 18 passes with pixels
masked in place (the sequence keeps its length), and PixelFlipping of Quantus as in its documentation (224
pixels per step, black), which gives one deletion curve. Quantus is optional and no dependency.

First, a run of `verify` over generated JPEG images, in a folder and in WebDataset shards: the share of its
time that is spent in the model rather than waiting for images or the disk (goal: 95 %).
"""

import argparse
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import processes
from benchmarks.loading import generated
from benchmarks.measure import ratios
from steadygaze.faithfulness import Batch, evaluate
from steadygaze.faithfulness.inputs import RATIOS
from steadygaze.faithfulness.removal import NAMES
from steadygaze.runs.loop import Pace
from steadygaze.runs.request import VerifyRequest
from steadygaze.runs.verify import prepare_verify, run_verify

GOAL = 10.5


def problem(name: str, images: int, methods: int) -> tuple[nn.Module, Batch, Tensor]:
    model = timm.create_model(name).eval()
    vit = sg.adapt(model)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(images, *vit.plan.input_size, generator=generator)
    maps = torch.randn(methods, images, *vit.grid, generator=generator)
    return model, Batch(pixels, torch.zeros(images, dtype=torch.long)), maps


@torch.no_grad()
def forward(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


@torch.no_grad()
def in_place(model: nn.Module, batch: Batch, maps: Tensor) -> None:
    """The same 18 passes per map at full length, hidden patches black, and one pass of the whole image."""
    model(batch.images)
    size = batch.images.shape[-2:]
    for scores in maps:
        order = scores.flatten(1).argsort(dim=1, descending=True, stable=True)
        patches = order.shape[1]
        for ratio in RATIOS:
            k = int(ratio * patches)
            for kept in (order[:, :k], order[:, k:]):
                there = (
                    torch.zeros(len(order), patches)
                    .scatter_(1, kept, 1.0)
                    .view(len(order), 1, *scores.shape[-2:])
                )
                mask = nn.functional.interpolate(there, size=size, mode="nearest")
                model(batch.images * mask).softmax(-1)


def quantus(model: nn.Module, batch: Batch, maps: Tensor) -> Callable[[], Any] | None:
    """PixelFlipping of one map of one image, or None where quantus is not installed."""
    try:
        from quantus import PixelFlipping
    except ImportError:
        return None
    size = batch.images.shape[-2:]
    pixels = nn.functional.interpolate(maps[0][:, None], size=size, mode="bilinear").numpy()
    metric = PixelFlipping(
        features_in_step=size[0], perturb_baseline="black", disable_warnings=True, display_progressbar=False
    )
    arguments = {
        "x_batch": batch.images.numpy(),
        "y_batch": batch.labels.numpy(),
        "a_batch": pixels,
        "device": "cpu",
    }
    return lambda: metric(model=model, **arguments)


def peak(name: str, threads: int, images: int, methods: int) -> float:
    """Peak MiB of a separate process that loads the model and scores the maps.

    Without methods the process only runs the images through the model once.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, threads, images, methods))


def _peak(name: str, threads: int, images: int, methods: int) -> float:
    torch.set_num_threads(threads)
    model, batch, maps = problem(name, images, methods)
    if methods:
        evaluate(model, batch, maps, NAMES)
    else:
        forward(model, batch.images)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def shares(name: str, images: int, workers: list[int]) -> Table:
    """The share of the time of a run that is spent in the model."""
    table = Table("data", "workers", "share in the model", "seconds", title=f"verify, {images} images")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        torch.manual_seed(0)
        save_file(timm.create_model(name).state_dict(), root / "random.safetensors")
        kinds = generated(root, images)
        for kind, count in product(kinds, workers):
            request = VerifyRequest(
                random=False,
                model=name,
                checkpoint=root / "random.safetensors",
                data=kinds[kind],
                out=root / f"{kind}{count}",
                methods=["ixg"],
                batch_size=8,
                num_workers=count,
                device="cpu",
            )
            ready, pace = prepare_verify(request), Pace()
            run_verify(request, prepared=ready, pace=pace)
            seconds = pace.model + pace.waiting
            table.add_row(kind, str(count), f"{100 * pace.share:.1f} %", f"{seconds:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--workers", default="0,1", help="numbers of threads that load images")
    parser.add_argument("--loading-only", action="store_true", help="only time the run over files")
    parser.add_argument(
        "--no-quantus", action="store_true", help="leave out Quantus, which takes hundreds of forward passes"
    )
    parser.add_argument("--processes", type=int, help="time a run on this many processes against one instead")
    parser.add_argument("--images", type=int, default=64, help="images of a run that is timed")
    options = parser.parse_args()
    console = Console(width=140)
    if options.processes:
        processes.main(options.model, options.images, options.processes, options.rounds, console)
        return
    torch.set_num_threads(options.threads)
    console.print(shares(options.model, options.images, [int(text) for text in options.workers.split(",")]))
    if options.loading_only:
        return

    model, batch, maps = problem(options.model, 1, 1)
    unit = partial(forward, model, batch.images)
    runs: dict[str, Callable[[], Any]] = {
        "steadygaze: true removal": partial(evaluate, model, batch, maps, NAMES),
        "pixels masked in place": partial(in_place, model, batch, maps),
    }
    found = ratios(unit, runs, options.rounds)
    asked = dict.fromkeys(runs, "4 scores, 9 ratios")
    peer = None if options.no_quantus else quantus(model, batch, maps)
    if peer is not None:
        found |= ratios(unit, {"Quantus PixelFlipping": peer}, 1)
        asked["Quantus PixelFlipping"] = f"1 deletion curve, {batch.images.shape[-1]} steps"
    table = Table(
        "one method, one image",
        "what",
        "forward passes",
        "ms",
        title=f"{options.model}, {options.threads} thread(s)",
    )
    for name, (seconds, ratio) in found.items():
        table.add_row(name, asked[name], f"{ratio:.2f}", f"{1000 * seconds:.0f}")
    console.print(table)
    if peer is None:
        console.print(
            "Quantus: left out"
            + (" as asked" if options.no_quantus else ": not installed (pip install quantus)")
        )

    table = Table(
        "images",
        "methods",
        "forward passes an image and method",
        "images per second",
        "peak MiB of the process",
    )
    table.add_row(
        str(options.batch),
        "0 (one forward)",
        "",
        "",
        f"{peak(options.model, options.threads, options.batch, 0):.0f}",
    )
    for images, methods in ((1, 1), (options.batch, 1), (options.batch, 4), (options.batch, 12)):
        model, batch, maps = problem(options.model, images, methods)
        run = partial(evaluate, model, batch, maps, NAMES)
        seconds, ratio = ratios(
            partial(forward, model, batch.images), {"": run}, max(1, options.rounds // methods)
        )[""]
        memory = peak(options.model, options.threads, images, methods)
        table.add_row(
            str(images), str(methods), f"{ratio / methods:.2f}", f"{images / seconds:.2f}", f"{memory:.0f}"
        )
    console.print(table)
    own = found["steadygaze: true removal"][1]
    verdict = "held" if own <= GOAL else "MISSED"
    console.print(
        f"Goal: at most {GOAL} forward passes for one method and image. Measured: {own:.2f}: {verdict}."
    )


if __name__ == "__main__":
    main()
