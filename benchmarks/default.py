"""Paired comparison of one method with others, score by score.

    python -m benchmarks.default RUN... [--method gaze_removal] [--half report]

Reads the rows of `steadygaze verify` runs over the same images and prints Markdown: the scores of each method
(percent, higher is better), then the paired differences of METHOD to each of them, with 95 % bootstrap
intervals over the images. Each method is compared with its own target score. --half: of ImageNet's classes,
in the order of their synsets, those with index % 8 = 0 are for choosing, those with index % 8 = 4 for
reporting.

Instead of runs:
    --cost MODEL                        cost of METHOD and `gaze` in forward passes (CPU time, one thread)
    --parts MODEL [FILE] --data FOLDER  removal scores of `gaze_removal` and its parts Σ_l q^l + p, Σ_l s^l
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import steadygaze as sg

REMOVAL = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
LOCAL = ("average_precision", "pointing_game")
REMAINDER = {"choose": 0, "report": 4}
REMOVED = {"gaze_keys": "log_odds"}  # methods of committed rows that no longer exist, with the score they had


def table(runs: list[Path], method: str, half: str | None) -> None:
    rows = sg.Rows.read(*runs).to_pandas()
    names = [name for name in (*REMOVAL, *LOCAL) if name in set(rows.metric)]
    own = {name: own_score(name, list(group.score)) for name, group in rows.groupby("method")}
    rows = rows[rows.metric.isin(names) & (rows.score == rows.method.map(own))]
    rows = rows.drop_duplicates(["image", "method", "metric"])
    if half:
        from timm.data import ImageNetInfo

        index = {synset: i for i, synset in enumerate(ImageNetInfo().label_names())}
        rows = rows[rows.image.map(lambda image: index[image.split("/")[0]] % 8 == REMAINDER[half])]
    wide = rows.pivot(index="image", columns=["method", "metric"], values="value").dropna()
    shown = sorted(dict.fromkeys(m for m, _ in wide.columns), key=lambda m: -wide[m].to_numpy().mean())
    heads = [name.replace("_", " ") for name in names] + ["mean"]
    print(f"{len(wide)} images\n\n| method | score | {' | '.join(heads)} |")
    print(f"| --- | --- |{' ---: |' * len(heads)}")
    value = {m: np.column_stack([wide[m][list(names)], wide[m][list(names)].mean(axis=1)]) for m in shown}
    for m in shown:
        print(f"| {m} | {own[m]} | {' | '.join(f'{v:.1f}' for v in value[m].mean(0))} |")
    print(f"\n| {method} minus | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}")
    draw = np.random.default_rng(0).integers(0, len(wide), (4000, len(wide)))
    for m in (m for m in shown if m != method):
        change = value[method] - value[m]
        ends = np.percentile(change[draw].mean(1), [2.5, 97.5], axis=0)
        cells = [
            f"{c:+.1f} [{low:+.1f}, {high:+.1f}]" for c, low, high in zip(change.mean(0), *ends, strict=True)
        ]
        print(f"| {m} | {' | '.join(cells)} |")


def own_score(method: str, scores: list[str]) -> str:
    """The target score of a method; of an unregistered one the recorded score, else the first in its rows."""
    try:
        return sg.method(method).score
    except sg.UnknownNameError:
        return REMOVED.get(method, scores[0])


def cost(model: str, methods: list[str], rounds: int, batch: int) -> None:
    import timm
    import torch

    torch.set_num_threads(1)
    net = timm.create_model(model).eval()
    images = torch.randn(batch, *net.default_cfg["input_size"])
    unit = torch.no_grad()(partial(net, images))
    vit = sg.adapt(net)
    runs: dict[str, Any] = {name: partial(sg.explain, vit, images, 1, name) for name in methods}
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            before, taken, after = (_seconds(call) for call in (unit, run, unit))
            if turn:  # the first warms up
                ratios[name].append(2 * taken / (before + after))
    print(f"{model}, batch {batch}, {rounds} rounds\n\n| method | forwards |\n| --- | ---: |")
    for name, values in ratios.items():
        print(f"| {name} | {np.median(values):.2f} |")


def parts(model: str, checkpoint: str | None, folder: Path, batch: int) -> None:
    import torch

    from steadygaze.data.folders import ClassLookup, read_class_folders
    from steadygaze.data.images import read_image
    from steadygaze.faithfulness.evaluate import evaluate
    from steadygaze.faithfulness.inputs import Batch
    from steadygaze.loading.load import load_model

    torch.set_num_threads(1)
    ready = load_model(model, checkpoint=checkpoint)
    vit = sg.adapt(ready.model)
    items = read_class_folders(folder, ClassLookup(ready.class_names, ready.model.num_classes))
    batches = []
    for start in range(0, len(items), batch):
        some = items[start : start + batch]
        images = torch.stack([ready.preprocess(read_image(item.path)) for item in some])
        labels = torch.tensor([item.label for item in some])
        maps = sg.explain(vit, images, labels, ["gaze", "gaze_removal"])
        both, sent = maps["gaze_removal"].scores, maps["gaze"].scores / len(vit.blocks)
        seen = Batch(images=images, labels=labels, names=tuple(item.name for item in some))
        values = evaluate(vit, seen, torch.stack([both, sent, both - sent]), REMOVAL).values
        batches.append(torch.stack([values[name].value for name in REMOVAL], -1))
    mean = torch.cat(batches, 1).mean(1)
    print(f"{model}, {len(items)} images\n\n| map | {' | '.join(REMOVAL)} | mean |\n| --- |{' ---: |' * 5}")
    for name, row in zip(
        ("both", "contribution of the patch (s)", "attention paid to it (q)"), mean.tolist(), strict=True
    ):
        print(f"| {name} | {' | '.join(f'{v:.1f}' for v in (*row, sum(row) / 4))} |")


def _seconds(call: Any) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--method", default="gaze_removal")
    parser.add_argument("--half", choices=REMAINDER)
    parser.add_argument("--cost", metavar="MODEL")
    parser.add_argument("--parts", metavar=("MODEL", "FILE"), nargs="+")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    chosen = parser.parse_args()
    if chosen.cost:
        cost(chosen.cost, [chosen.method, "gaze"], chosen.rounds, chosen.batch)
    elif chosen.parts and chosen.data:
        parts(chosen.parts[0], (*chosen.parts, None)[1], chosen.data, chosen.batch)
    elif chosen.runs:
        table(chosen.runs, chosen.method, chosen.half)
    else:
        parser.error("give the folders of verify runs, or --cost MODEL, or --parts MODEL --data FOLDER")


if __name__ == "__main__":
    main()
