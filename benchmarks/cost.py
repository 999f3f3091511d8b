"""The cost model of runs: forward passes of methods, metrics and suites, bytes of rows, and large runs.

    python -m benchmarks.cost [--searches] [--rate PASSES_A_SECOND] [--gpus N] [--images N]

One forward pass is one run of the blocks on all tokens of one image; a run on half of the tokens counts
half, a backward pass counts as one. Passes are counted, not timed, on a ViT with the tokens and layers of
DeiT and narrow layers (random weights), so that counting takes a minute; widths do not change them. What is
timed is what the CPU does beside the model. Prints the tables of docs/scale.md as Markdown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import steadygaze as sg
from benchmarks.counting import PassCounter
from steadygaze.data.datasets.imagenet import COMMON
from steadygaze.data.images import read_image
from steadygaze.data.preprocess import Preprocess
from steadygaze.faithfulness import Batch, evaluate
from steadygaze.faithfulness.metric import METRICS
from steadygaze.loading.loaded import LoadedModel
from steadygaze.methods.registry import forward_passes
from steadygaze.robustness.corruptions.corrupt import corrupt
from steadygaze.runs.plan import SEARCHES, choose
from steadygaze.runs.request import DEFAULT_METRICS, StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.store import row_line
from steadygaze.runs.stress import prepare_stress, run_stress

SIDE, METHODS, CORRUPTIONS = 224, 40, 75
CLEAN = ("top1", "top5", "confidence")  # of the clean image, in every run
SUITES = ("corruptions", "sequences", "attacks", "occlusion", "attention")


def model() -> VisionTransformer:
    """Tokens, layers and classes of DeiT, in narrow layers."""
    torch.manual_seed(0)
    return VisionTransformer(patch_size=16, embed_dim=24, depth=12, num_heads=3, num_classes=1000).eval()


class Counter:
    """Forward passes of calls."""

    def __init__(self, net: VisionTransformer) -> None:
        self.passes = PassCounter(net, sg.adapt(net), (SIDE, SIDE))

    def __call__(self, run: Callable[[], object]) -> float:
        before = self.passes.total
        with self.passes.counting():
            run()
        return self.passes.total - before


def heading(text: str, columns: Sequence[str]) -> None:
    print(f"\n{text}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")


def line(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def count_methods(net: VisionTransformer, count: Counter, searches: bool) -> float:
    """Prints the passes of each method, alone; returns those of all methods but searches, together."""
    images = torch.rand(1, 3, SIDE, SIDE)
    known = choose(sg.adapt(net), ["all"])
    heading("Methods, for one image.", ["forward passes, counted", "declared", "methods"])
    same: dict[tuple[float, float], list[str]] = {}
    for method in known:
        if method.base.family == SEARCHES and not searches:
            continue
        passes = round(count(lambda method=method: sg.explain(net, images, 0, method)), 1)
        same.setdefault((passes, forward_passes(method)), []).append(method.name)
    for (passes, declared), names in sorted(same.items()):
        line(f"{passes:g}", f"{declared:g}", ", ".join(f"`{name}`" for name in names))
    quick = [method for method in known if method.base.family != SEARCHES]
    together = count(lambda: sg.explain(net, images, 0, method=quick))
    line(f"{together:.1f}", "", f"these {len(quick)} without searches in one call (`--methods quick`)")
    return together / len(quick) * METHODS


def count_metrics(net: VisionTransformer, count: Counter) -> dict[str, float]:
    """Prints the passes of each metric; returns those for a map of removal."""
    half = torch.full((3,), 0.5)
    masks = torch.zeros(1, SIDE, SIDE, dtype=torch.uint8)
    masks[:, 50:150, 50:150] = 255
    batch = Batch(torch.rand(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long), masks, half, half, ("a",))
    again = 0

    def explain(_: object, images: Tensor, target: Tensor) -> Tensor:
        nonlocal again
        again += 1
        return torch.rand(number, 1, 14, 14)

    groups: dict[object, list[str]] = {}
    for name, metric in METRICS.items():
        if metric.family != "custom" and not metric.suite:
            groups.setdefault((metric.compute, *_split(name)), []).append(name)
    columns = ["metrics", "for each map", "for each image", "for each batch", "maps made again"]
    heading(
        "Metrics. Those of one line share their passes; `srg` includes the passes of the line above it.",
        columns,
    )
    counted: dict[str, float] = {}
    for names in groups.values():
        passes = []
        for number in (1, 2):
            again = 0
            maps = torch.rand(number, 1, 14, 14)
            run = lambda maps=maps, names=names: evaluate(net, batch, maps, names, explain=explain)  # noqa: E731
            if number == 1:
                count(run)  # what is made once for a model
                again = 0
            passes.append(count(run))
        each = passes[1] - passes[0]
        rest = passes[0] - each
        copied = (
            6.0 if any("randomization" in name for name in names) else 0.0
        )  # a copy of the model is checked, and its parts found
        shown = ", ".join(f"`{name}`" for name in names)
        line(shown, f"{each:.1f}", f"{rest - copied:.0f}", f"{copied:.0f}", again or "")
        counted |= dict.fromkeys(names, each)
    return counted


def _split(name: str) -> tuple[str, ...]:
    """Metrics of pixels share passes by sign, and by what fills the pixels; `srg` adds some to removal's."""
    if name == "srg":
        return (name,)
    sign, _, kind = name.partition("_")
    if sign not in ("positive", "negative"):
        return ()
    return sign, "fill" if kind == "perturbation" else "noise"


def image_folder(folder: Path, images: int = 2) -> Path:
    """Labeled JPEG files of 500 x 375 pixels."""
    rng = np.random.default_rng(0)
    for number in range(images):
        coarse = rng.integers(0, 256, (15, 20, 3), dtype=np.uint8)
        (folder / str(number)).mkdir(parents=True)
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(
            folder / str(number) / f"ILSVRC2012_val_{number:08d}.JPEG", quality=90
        )
    return folder


def loaded(net: VisionTransformer) -> LoadedModel:
    preprocess = Preprocess.resize_and_crop((SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3)
    return sg.load_model(net, preprocess=preprocess)


def count_suites(net: VisionTransformer, count: Counter, data: Path) -> dict[str, float]:
    """Prints passes, rows and bytes of each suite with its default options."""
    heading(
        "Suites with default options, for one image.", ["suite", "forward passes", "rows", "bytes per row"]
    )
    sizes: dict[str, float] = {}
    for suite in SUITES:
        request = StressRequest(model=loaded(net), data=data, suites=suite, limit=1, num_workers=0)
        ready, found = prepare_stress(request), list[Rows]()
        run = partial(run_stress, request, prepared=ready)
        passes = count(lambda run=run, found=found: found.append(run())) - 1  # the clean image
        rows = [row for row in found[0] if row["metric"] not in CLEAN or row["setting"] != "clean"]
        sizes[suite] = sum(map(len, map(row_line, rows))) / len(rows)
        line(f"`{suite}`", f"{passes:,.1f}", len(rows), f"{sizes[suite]:.0f}")
    return sizes


def measure_rows(net: VisionTransformer, data: Path) -> float:
    """Prints the bytes of the rows of `verify`; returns those of the default metrics."""
    columns = ["bytes per row", "metrics of `verify`"]
    heading("Rows, with names of ImageNet's validation images.", columns)
    metrics = [
        name
        for name, metric in METRICS.items()
        if not (metric.needs_masks or metric.needs_explain or metric.suite)
    ]
    rows = sg.verify(loaded(net), data, methods="gae", metrics=metrics, limit=1)
    sizes = {row["metric"]: len(row_line(row)) for row in rows}
    by_size: dict[int, list[str]] = {}
    for name, size in sizes.items():
        by_size.setdefault(round(size, -2), []).append(name)
    for size, names in sorted(by_size.items()):
        line(f"about {size}", ", ".join(f"`{name}`" for name in names))
    line(14 * 14 * 2, "a map of 14 x 14 patches, float16 (not a row)")
    return float(np.mean([sizes[name] for name in DEFAULT_METRICS]))


def measure_cpu(data: Path) -> tuple[float, float]:
    """Prints what the CPU does beside the model; returns the seconds of a corruption and of reading."""
    heading("Work outside the model, one core, images of 224 pixels.", ["task", "ms"])
    file = next(data.rglob("*.JPEG"))
    preprocess = Preprocess.resize_and_crop((SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3)
    reading = _seconds(lambda: preprocess.pixels(read_image(file)), 10)
    line("reading and resizing a JPEG of 500 x 375", f"{1000 * reading:.1f}")
    pixels = np.asarray(preprocess.pixels(read_image(file)))
    each = {name: _seconds(lambda name=name: corrupt(pixels, name, 3, seed=0), 2) for name in COMMON}
    ordered = sorted(each, key=each.__getitem__)
    for name in (ordered[0], ordered[-1]):
        line(f"`{name}`, severity 3", f"{1000 * each[name]:.1f}")
    mean = float(np.mean(list(each.values())))
    line(f"mean of the {len(COMMON)} corruptions, severity 3", f"{1000 * mean:.1f}")
    with tempfile.TemporaryFile() as sink:

        def append() -> None:
            sink.write(b"x" * 20_000)
            sink.flush()
            os.fsync(sink.fileno())

        line(
            "appending the rows of a job, with fsync, on the local disk", f"{1000 * _seconds(append, 20):.1f}"
        )
    return mean, reading


def _seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    began = time.process_time() if repeats < 20 else time.perf_counter()
    for _ in range(repeats):
        run()
    return ((time.process_time() if repeats < 20 else time.perf_counter()) - began) / repeats


def carry(
    images: int, gpus: int, rate: float, quick: float, removal: float, verify_row: float, stress_row: float
) -> None:
    """Prints the cost of large runs."""
    metrics = len(DEFAULT_METRICS)
    one_image = quick + METHODS * removal + 1
    runs = {
        f"`verify`, {METHODS} methods": (one_image, METHODS * metrics, verify_row),
        f"`stress`, {CORRUPTIONS} corruptions": (CORRUPTIONS + 1.0, (CORRUPTIONS + 1) * 3, stress_row),
        f"`verify`, {METHODS} methods, each of {CORRUPTIONS} corruptions": (
            CORRUPTIONS * one_image,
            CORRUPTIONS * METHODS * metrics,
            verify_row,
        ),
    }
    text = f"{images:,} images on {gpus} GPUs, at {rate:,.0f} forward passes per second each (an assumption)."
    heading(text, ["run", "forward passes", "hours", "rows", "rows on disk", "rows per second, all"])
    for name, (passes, rows, size) in runs.items():
        seconds = images * passes / rate / gpus
        written = images * rows
        line(
            name,
            f"{images * passes:.2e}",
            f"{seconds / 3600:.2f}",
            f"{written:,}",
            f"{written * size / 1e9:.1f} GB",
            f"{written / seconds:,.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--searches", action="store_true", help="count the searches too, which takes minutes")
    parser.add_argument("--rate", type=float, default=1000.0, help="forward passes per second of one GPU")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--images", type=int, default=50_000)
    options = parser.parse_args()
    net = model()
    count = Counter(net)
    with tempfile.TemporaryDirectory() as folder:
        data = image_folder(Path(folder))
        quick = count_methods(net, count, options.searches)
        removal = count_metrics(net, count)["insertion_accuracy"]
        stress_row = count_suites(net, count, data)["corruptions"]
        verify_row = measure_rows(net, data)
        corruption, reading = measure_cpu(data)
    carry(options.images, options.gpus, options.rate, quick, removal, verify_row, stress_row)
    cores = (corruption + (reading / (CORRUPTIONS + 1))) * options.rate
    print(f"\nCores that keep one GPU busy with corruptions at that rate: {cores:.0f}.")


if __name__ == "__main__":
    main()
