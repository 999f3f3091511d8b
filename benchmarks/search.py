"""Searched methods: what token removal gains, whether names differ, and the overinterpretation figure.

    python -m benchmarks.search speed --model NAME [--checkpoint FILE] --images FOLDER [--count 3] [--budget 200]
    python -m benchmarks.search sufficient --model NAME [--checkpoint FILE] --images FOLDER [--count 3]
    python -m benchmarks.search names --model NAME [--checkpoint FILE] --images FOLDER [--count 5] [--budget 200]
    python -m benchmarks.search overinterpretation --model NAME [--checkpoint FILE] --images FILES [--out PNG] [--step 100 | --summed]

speed: each method on tokens that are removed beside the usual version, which paints the pixels: the same runs, and the fewest that are as
good. Seconds are those of this process, not of the clock, so that a busy machine does not count. Quality is the mean of insertion and
deletion AOPC (token removal; higher is better), with the positive perturbation area (patches painted black; lower is better) beside it,
since the one hides as the first does and the other as the second; ± is the standard error over the pictures.
sufficient: subsets of patches beside subsets of pixels. names: the mean correlation of the maps of any two methods.
overinterpretation: for any picture and any class, how many pixels are enough? By the paper's walk with so many pixels a step, or by the
one that adds its gradients up.
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
from steadygaze.loading.load import Loaded, load_model
from steadygaze.methods.perturbation import cells, sides
from steadygaze.methods.sufficient import SufficientSubsets, subsets

BUDGETED = ("rise", "lime", "kernel_shap", "hsic")
QUALITY = ("insertion_aopc", "deletion_aopc", "positive_perturbation")


def pictures_of(loaded: Loaded, folder: list[Path], count: int) -> Tensor:
    files = find_images(folder)
    return torch.stack(
        [loaded.preprocess(read_image(f)) for f in files[:: max(1, len(files) // count)][:count]]
    )


def seconds(run: Any) -> tuple[float, Any]:
    begin = time.process_time()
    found = run()
    return time.process_time() - begin, found


def speed(loaded: Loaded, images: Tensor, budget: int, methods: list[str] | None) -> None:
    """Painted with all runs; removed with all, a half and a quarter of them: the smallest that is as good is the equal."""
    model, labels, unit = loaded.model, *unit_of(loaded, images)
    batch = Batch(images, labels, None, torch.tensor(loaded.mean), torch.tensor(loaded.std))
    print("| method | painted: runs, cost | AOPC, perturbation | removed, the same runs: cost | AOPC, perturbation | gain "
          "| AOPC, removed − painted | as good: runs, cost | gain |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    grid = sg.adapt(model).grid
    runs = dict.fromkeys(BUDGETED, budget) | {"occlusion": grid[0] * grid[1] + 1, "pami": regions(*grid)}
    for name in methods or runs:
        total = runs[name]
        asks = [
            sg.method(name, hide="fill", budget=total),
            *(sg.method(name, hide="remove", budget=max(4, total // k)) for k in (1, 2, 4)),
        ]
        taken = [
            seconds(lambda ask=ask: sg.explain(model, images, target=labels, method=ask)) for ask in asks
        ]
        cost = [spent / len(images) / unit for spent, _ in taken]
        found = evaluate(
            model, batch, torch.stack([att.scores for _, att in taken]), QUALITY, target=labels
        ).values
        each = (found[QUALITY[0]].value + found[QUALITY[1]].value) / 2  # (ask, picture)
        aopc, area = each.mean(1).tolist(), found[QUALITY[2]].value.mean(1).tolist()
        said = [f"{x:.1f}, {y:.1f}" for x, y in zip(aopc, area, strict=True)]
        more = each[1] - each[0]
        differ = f"{more.mean():+.1f} ± {more.std() / len(more) ** 0.5:.1f}"
        good = [i for i in (1, 2, 3) if aopc[i] >= aopc[0]]
        equal = (
            f"{asks[good[-1]].option('budget')}, {cost[good[-1]]:.0f} | {cost[0] / cost[good[-1]]:.1f}x"
            if good
            else "not reached | "
        )
        same = f"{cost[1]:.0f} | {said[1]} | {cost[0] / cost[1]:.1f}x | {differ}"
        print(f"| `{name}` | {total}, {cost[0]:.0f} | {said[0]} | {same} | {equal} |", flush=True)


def unit_of(loaded: Loaded, images: Tensor) -> tuple[Tensor, float]:
    """The predicted classes, and the seconds of one forward pass of one image."""
    with torch.no_grad():
        labels = loaded.model(images).argmax(1)
        unit = min(seconds(lambda: loaded.model(images))[0] for _ in range(3)) / len(images)
    print(f"{len(images)} pictures; costs are per image, in forward passes of {unit:.3f} s\n")
    return labels, unit


def sufficient(loaded: Loaded, images: Tensor, budget: int) -> None:
    """Patches by removal, pixels by painting."""
    labels, unit = unit_of(loaded, images)
    print("| places | steps | cost | reached | share of the picture |\n| --- | --- | --- | --- | --- |")
    ways: dict[str, Any] = {
        "patches": {"minimal": False}, "patches, then pruned": {}, "patches, gradients added up": {"minimal": False, "summed": True},
        "patches, gradients added up, then pruned": {"summed": True}, "pixels, gradients added up": {"space": "pixels", "summed": True},
        "pixels": {"space": "pixels"},
    }  # fmt: skip
    for name, how in ways.items():
        spent, found = seconds(lambda how=how: subsets(loaded.model, images, labels, **how))
        share = 100 * found.size[found.reached].float() / found.subset[0].numel()
        print(f"| {name} | {found.confidence.shape[1]} | {spent / len(images) / unit:.0f} | {int(found.reached.sum())} of {len(images)} "
              f"| {share.mean():.1f} % |", flush=True)  # fmt: skip


def regions(height: int, width: int) -> int:
    """The runs of pami."""
    return sum(1 for side in sides(height, width) for _ in cells(height, width, side))


def names(loaded: Loaded, images: Tensor, budget: int) -> None:
    """Mean over the pictures of the correlation of any two maps."""
    chosen = {i.name: i.name for i in sg.list_methods() if i.family == "black box"}
    chosen |= {name: f"{name}:budget={budget}" for name in BUDGETED}
    chosen |= {name: name for name in ("gaze", "gae", "cat", "decompx", "rollout", "gradcam")}
    maps = {}
    for name, text in chosen.items():
        spent, att = seconds(lambda text=text: sg.explain(loaded.model, images, method=text))
        x = att.scores.flatten(1).double()
        maps[name] = (x - x.mean(1, keepdim=True)) / x.std(1, unbiased=False, keepdim=True).clamp_min(1e-30)
        print(f"# {text}: {spent / len(images):.1f} s an image", flush=True)
    print("| | " + " | ".join(maps) + " |\n" + "| --- " * (len(maps) + 1) + "|")
    for a in maps:
        print(f"| `{a}` | " + " | ".join(f"{(maps[a] * maps[b]).mean(1).mean():.2f}" for b in maps) + " |")
    pairs = {(a, b): float((maps[a] * maps[b]).mean(1).mean()) for a, b in itertools.combinations(maps, 2)}
    top = max(pairs, key=lambda pair: pairs[pair])
    print(f"\nmost alike: {top[0]} and {top[1]}, {pairs[top]:.3f}")


def overinterpretation(
    loaded: Loaded, files: list[Path], out: Path | None, step: int, others: int = 3, summed: bool = False
) -> None:
    """Every picture for its predicted class and for classes that have nothing to do with it."""
    images = torch.stack([loaded.preprocess(read_image(f)) for f in files])
    with torch.no_grad():
        p = loaded.model(images).softmax(1)
    classes = p.shape[1]
    wanted = torch.stack([torch.cat([row.argmax()[None], (row.argmax() + torch.arange(1, others + 1) * classes // (others + 1)) % classes])
                          for row in p])  # fmt: skip
    many, target = images.repeat_interleave(others + 1, 0), wanted.flatten()
    steps = -(-images.shape[-1] * images.shape[-2] // step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how: Any = {"summed": True} if summed else {"budget": 2 * steps}
        spent, found = seconds(lambda: subsets(loaded.model, many, target, space="pixels", **how))
    way = "gradients added up" if summed else f"{step} pixels a step"
    print(f"{way}, {found.confidence.shape[1]} steps, {spent:.0f} s, threshold 0.9\n")
    print(
        "| picture | class | whole picture | pixels that are left | sure |\n| --- | --- | --- | --- | --- |"
    )
    share = 100 * found.size / found.subset[0].numel()
    named = loaded.classes or [str(c) for c in range(classes)]
    for i, c in enumerate(target.tolist()):
        mark = "" if found.reached[i] else " (most that was reached)"
        print(f"| {files[i // (others + 1)].stem} | {named[c]} | {100 * p[i // (others + 1), c]:.3f} % | {share[i]:.1f} % "
              f"| {100 * found.subset_confidence[i]:.1f} %{mark} |")  # fmt: skip
    reached = found.reached
    print(
        f"\nreached for {int(reached.sum())} of {len(target)}; there {share[reached].mean():.1f} % of the pixels on average"
    )
    if out is not None:
        drawn(loaded, images, found, target, named, others).quantize(128).save(out, optimize=True)


def drawn(
    loaded: Loaded, images: Tensor, found: SufficientSubsets, target: Tensor, named: Any, others: int
) -> Image.Image:
    """One row a picture: itself, then only the pixels of each subset, on grey."""
    rows = []
    for b, image in enumerate(images):
        picture = loaded.picture(image)
        parts, texts = [picture], ["whole"]
        for i in range(b * (others + 1), (b + 1) * (others + 1)):
            seen = np.asarray(picture).copy()
            seen[~found.subset[i].numpy()] = 128
            share = 100 * float(found.subset[i].float().mean())
            parts.append(Image.fromarray(seen))
            texts.append(
                f"{named[int(target[i])].split(',')[0]}: {100 * found.subset_confidence[i]:.0f} % from {share:.1f} %"
            )
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
        images = pictures_of(loaded, args.images, args.count)
        if args.what == "speed":
            speed(loaded, images, args.budget, args.methods)
        else:
            {"sufficient": sufficient, "names": names}[args.what](loaded, images, args.budget)


if __name__ == "__main__":
    main()
