"""Searched methods: what token removal gains, whether names differ, and the overinterpretation figure.

    python -m benchmarks.search speed --model NAME --images FOLDER [--count 3] [--budget 200] python -m
    benchmarks.search sufficient --model NAME --images FOLDER [--count 3] python -m benchmarks.search names
    --model NAME --images FOLDER [--count 5] [--budget 200] python -m benchmarks.search overinterpretation
    --model NAME --images FILES [--out PNG] [--step 100 | --summed]

All accept --checkpoint FILE.

speed: each method with token removal against the usual version, which replaces pixels: at the same number of
runs, and at the smallest number that is as good. Seconds are CPU time of this process, so other load does not
count. Quality is the mean of insertion and deletion AOPC (token removal; higher is better) and the positive
perturbation area (pixels set to black; lower is better), because each metric favors the version that hides
patches in the same way; ± is the standard error over the images.
sufficient: subsets of patches against subsets of pixels. names: mean correlation of the maps of any two
methods.
overinterpretation: how many pixels are sufficient, for any image and any class? With the paper's search (a
fixed number of pixels per step), or with gradients accumulated over the steps.
"""

import argparse
import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import steadygaze as sg
from steadygaze.data.images import find_images, read_image
from steadygaze.faithfulness import Batch, evaluate
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.methods.perturbation import cells, sides
from steadygaze.methods.sufficient import SufficientSubsets, subsets

BUDGETED = ("rise", "lime", "kernel_shap", "hsic")
QUALITY = ("insertion_aopc", "deletion_aopc", "positive_perturbation")


def read_images(loaded: LoadedModel, folder: list[Path], count: int) -> Tensor:
    files = find_images(folder)
    return torch.stack(
        [loaded.preprocess(read_image(f)) for f in files[:: max(1, len(files) // count)][:count]]
    )


def seconds(run: Any) -> tuple[float, Any]:
    begin = time.process_time()
    result = run()
    return time.process_time() - begin, result


def speed(loaded: LoadedModel, images: Tensor, budget: int, methods: list[str] | None) -> None:
    """Pixels replaced with all runs; tokens removed with all, half and a quarter of the runs."""
    model, labels, unit = loaded.model, *unit_of(loaded, images)
    batch = Batch(images, labels, None, torch.tensor(loaded.mean), torch.tensor(loaded.std))
    print(
        "| method | pixels: runs, cost | AOPC, perturbation | removal, same runs: cost | AOPC, perturbation "
        "| speed-up | AOPC, removal − pixels | as good: runs, cost | speed-up |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    grid = sg.adapt(model).grid
    runs = dict.fromkeys(BUDGETED, budget) | {"occlusion": grid[0] * grid[1] + 1, "pami": regions(*grid)}
    for name in methods or runs:
        total = runs[name]
        variants = [
            sg.method(name, hide="fill", budget=total),
            *(sg.method(name, hide="remove", budget=max(4, total // k)) for k in (1, 2, 4)),
        ]
        taken = [
            seconds(lambda variant=variant: sg.explain(model, images, target=labels, method=variant))
            for variant in variants
        ]
        cost = [spent / len(images) / unit for spent, _ in taken]
        maps = torch.stack([attribution.scores for _, attribution in taken])
        measured = evaluate(model, batch, maps, QUALITY, target=labels).values
        each = (measured[QUALITY[0]].value + measured[QUALITY[1]].value) / 2  # (variant, image)
        aopc, area = each.mean(1).tolist(), measured[QUALITY[2]].value.mean(1).tolist()
        shown = [f"{x:.1f}, {y:.1f}" for x, y in zip(aopc, area, strict=True)]
        more = each[1] - each[0]
        differ = f"{more.mean():+.1f} ± {more.std() / len(more) ** 0.5:.1f}"
        good = [i for i in (1, 2, 3) if aopc[i] >= aopc[0]]
        equal = (
            f"{variants[good[-1]].option('budget')}, {cost[good[-1]]:.0f} | {cost[0] / cost[good[-1]]:.1f}x"
            if good
            else "not reached | "
        )
        same = f"{cost[1]:.0f} | {shown[1]} | {cost[0] / cost[1]:.1f}x | {differ}"
        print(f"| `{name}` | {total}, {cost[0]:.0f} | {shown[0]} | {same} | {equal} |", flush=True)


def unit_of(loaded: LoadedModel, images: Tensor) -> tuple[Tensor, float]:
    """The predicted classes, and the seconds of one forward pass of one image."""
    with torch.no_grad():
        labels = loaded.model(images).argmax(1)
        unit = min(seconds(lambda: loaded.model(images))[0] for _ in range(3)) / len(images)
    print(f"{len(images)} images; costs are per image, in forward passes of {unit:.3f} s\n")
    return labels, unit


def sufficient(loaded: LoadedModel, images: Tensor, budget: int) -> None:
    """Patches are removed, pixels are replaced."""
    labels, unit = unit_of(loaded, images)
    print("| space | steps | cost | reached | share of the image |\n| --- | --- | --- | --- | --- |")
    ways: dict[str, Any] = {
        "patches": {"minimal": False},
        "patches, then pruned": {},
        "patches, gradients accumulated": {"minimal": False, "summed": True},
        "patches, gradients accumulated, then pruned": {"summed": True},
        "pixels, gradients accumulated": {"space": "pixels", "summed": True},
        "pixels": {"space": "pixels"},
    }
    for name, options in ways.items():
        spent, result = seconds(lambda options=options: subsets(loaded.model, images, labels, **options))
        share = 100 * result.size[result.reached].float() / result.subset[0].numel()
        cost = spent / len(images) / unit
        reached = f"{int(result.reached.sum())} of {len(images)}"
        steps = result.confidence.shape[1]
        print(f"| {name} | {steps} | {cost:.0f} | {reached} | {share.mean():.1f} % |", flush=True)


def regions(height: int, width: int) -> int:
    """The runs of pami."""
    return sum(1 for side in sides(height, width) for _ in cells(height, width, side))


def names(loaded: LoadedModel, images: Tensor, budget: int) -> None:
    """Correlation of any two maps, averaged over the images."""
    chosen = {i.name: i.name for i in sg.list_methods() if i.family == "black box"}
    chosen |= {name: f"{name}:budget={budget}" for name in BUDGETED}
    chosen |= {name: name for name in ("gaze", "gae", "cat", "decompx", "rollout", "gradcam")}
    maps = {}
    for name, text in chosen.items():
        spent, att = seconds(lambda text=text: sg.explain(loaded.model, images, method=text))
        x = att.scores.flatten(1).double()
        maps[name] = (x - x.mean(1, keepdim=True)) / x.std(1, unbiased=False, keepdim=True).clamp_min(1e-30)
        print(f"# {text}: {spent / len(images):.1f} s per image", flush=True)
    print("| | " + " | ".join(maps) + " |\n" + "| --- " * (len(maps) + 1) + "|")
    for a in maps:
        print(f"| `{a}` | " + " | ".join(f"{(maps[a] * maps[b]).mean(1).mean():.2f}" for b in maps) + " |")
    pairs = {(a, b): float((maps[a] * maps[b]).mean(1).mean()) for a, b in itertools.combinations(maps, 2)}
    top = max(pairs, key=lambda pair: pairs[pair])
    print(f"\nmost similar: {top[0]} and {top[1]}, {pairs[top]:.3f}")


def overinterpretation(
    loaded: LoadedModel, files: list[Path], out: Path | None, step: int, others: int = 3, summed: bool = False
) -> None:
    """Every image for its predicted class and for unrelated classes."""
    images = torch.stack([loaded.preprocess(read_image(f)) for f in files])
    with torch.no_grad():
        p = loaded.model(images).softmax(1)
    classes = p.shape[1]
    predicted = p.argmax(1, keepdim=True)
    offsets = torch.arange(1, others + 1) * classes // (others + 1)
    target = torch.cat([predicted, (predicted + offsets) % classes], dim=1).flatten()
    repeated = images.repeat_interleave(others + 1, 0)
    steps = -(-images.shape[-1] * images.shape[-2] // step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: Any = {"summed": True} if summed else {"budget": 2 * steps}
        spent, result = seconds(lambda: subsets(loaded.model, repeated, target, space="pixels", **options))
    variant = "gradients accumulated" if summed else f"{step} pixels per step"
    print(f"{variant}, {result.confidence.shape[1]} steps, {spent:.0f} s, threshold 0.9\n")
    print("| image | class | whole image | remaining pixels | confidence |\n| --- | --- | --- | --- | --- |")
    share = 100 * result.size / result.subset[0].numel()
    named = loaded.class_names or [str(c) for c in range(classes)]
    for i, c in enumerate(target.tolist()):
        mark = "" if result.reached[i] else " (the highest reached)"
        row = i // (others + 1)
        confidence = f"{100 * result.subset_confidence[i]:.1f} %{mark}"
        print(
            f"| {files[row].stem} | {named[c]} | {100 * p[row, c]:.3f} % | {share[i]:.1f} % | {confidence} |"
        )
    reached = result.reached
    mean = share[reached].mean()
    print(f"\nreached: {int(reached.sum())} of {len(target)}, with {mean:.1f} % of the pixels on average")
    if out is not None:
        draw_subsets(loaded, images, result, target, named, others).quantize(128).save(out, optimize=True)


def draw_subsets(
    loaded: LoadedModel, images: Tensor, result: SufficientSubsets, target: Tensor, named: Any, others: int
) -> Image.Image:
    """One row per image: the image, then only the pixels of each subset, on gray."""
    rows = []
    for b, image in enumerate(images):
        original = loaded.to_image(image)
        parts, texts = [original], ["whole"]
        for i in range(b * (others + 1), (b + 1) * (others + 1)):
            seen = np.asarray(original).copy()
            seen[~result.subset[i].numpy()] = 128
            share = 100 * float(result.subset[i].float().mean())
            parts.append(Image.fromarray(seen))
            name = named[int(target[i])].split(",")[0]
            texts.append(f"{name}: {100 * result.subset_confidence[i]:.0f} % from {share:.1f} %")
        rows.append((parts, texts))
    return sheet_of(rows)


def sheet_of(rows: list[tuple[list[Image.Image], list[str]]]) -> Image.Image:
    side, bar = 224, 22
    sheet = Image.new("RGB", (len(rows[0][0]) * (side + 8), len(rows) * (side + bar)), "white")
    draw = ImageDraw.Draw(sheet)
    for r, (parts, texts) in enumerate(rows):
        for c, (cell, text) in enumerate(zip(parts, texts, strict=True)):
            sheet.paste(cell.resize((side, side)), (c * (side + 8), r * (side + bar) + bar))
            draw.text((c * (side + 8) + 2, r * (side + bar) + 5), text[:40], fill="black")
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=["speed", "sufficient", "names", "overinterpretation"], nargs="?", default="speed"
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--step", type=int, default=100)
    parser.add_argument("--summed", action="store_true")
    parser.add_argument("--others", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="+", help="speed: only these")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, args.checkpoint)
    loaded.model.eval()
    if args.what == "overinterpretation":
        overinterpretation(loaded, find_images(args.images), args.out, args.step, args.others, args.summed)
    else:
        images = read_images(loaded, args.images, args.count)
        if args.what == "speed":
            speed(loaded, images, args.budget, args.methods)
        else:
            {"sufficient": sufficient, "names": names}[args.what](loaded, images, args.budget)


if __name__ == "__main__":
    main()
