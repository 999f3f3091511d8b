"""Relevance fine-tuning of a model of the panel, with TokenCut masks: python -m benchmarks.relevance run |
table | removal

    run --cifar10 FOLDER --out DIR     train and measure what is not in DIR yet
    table DIR                          accuracy on seen and unseen classes, from the rows
    removal BEFORE AFTER,AFTER...      removal scores of explanations, from runs of `verify`

The tables are in docs/evidence/relevance.md. `benchmarks/panel/cifar10-average-pool` is fine-tuned on 40
images of each of CIFAR-10's first five classes ("seen") or last five; the other five are "unseen". Masks are
TokenCut's, from the model's own keys. Each model is tested on the same 500 test images, clean and under 15
corruptions of severity 3. Changes are paired by image, with 95 % intervals over images and seeds.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import steadygaze as sg
from benchmarks.measure import spread
from steadygaze.training.recipe import read_recipe

MODEL = "benchmarks/panel/cifar10-average-pool"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HALVES = {"first": (0, 5), "last": (5, 10)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # title, changes of relevance-deit-tiny-rollout
    "rollout-1e-5": ("relevance by rollout, rate 1e-5", {}),
    "rollout-1e-4": ("relevance by rollout, rate 1e-4", {"optimizer.lr": 1e-4}),
    "entropy-1e-5": ("cross-entropy, rate 1e-5", {"losses": {"cross_entropy": {}}}),
}
REMOVAL = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
METHODS = ("gaze", "gae", "decompx+skipplus")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    out, data = Path(options.out), Path(options.cifar10)
    given: dict[str, Any] = {
        "model.name": MODEL,
        "model.num_classes": None,
        "data.train": str(data / "train"),
        "data.test_classes": None,
        "data.test_images": None,
        "data.images": [0, 40],
        "data.masks": "tokencut",
        "data.cut_centered": True,
        "augment.crop": "pad",
        "test_every": 0,
        "tensorboard": False,
    }
    measure(MODEL, data, out / "before")
    for seed in options.seeds:
        for half, classes in HALVES.items():
            for name, (_, changes) in VARIANTS.items():
                folder = out / "models" / f"{name}-{half}-{seed}"
                rows = out / f"{name}-{half}-{seed}"
                print(rows.name, flush=True)
                if not (folder / "done").exists():
                    changed = given | {"data.classes": list(classes), "seed": seed} | changes
                    sg.train(read_recipe("relevance-deit-tiny-rollout", changed), folder)
                    (folder / "done").touch()
                measure(str(folder), data, rows)


def measure(model: str, data: Path, out: Path) -> None:
    """Accuracy under corruption of 500 images, removal scores of the explanations of 100."""
    loaded, test = sg.load_model(model), data / "test"
    sg.stress(loaded, test, "corruptions", severities="3", limit=500, batch_size=100, out=out / "stress")
    sg.verify(
        loaded, test, list(METHODS), list(REMOVAL), limit=100, batch_size=20, out=out / "verify", random=False
    )


# -- tables ----------------------------------------------------------------------------------------


def accuracy(folder: Path) -> pd.DataFrame:
    """Rows: images; columns: clean, corrupted (the mean over corruptions), in percent."""
    rows = sg.Rows.read(folder).to_pandas()
    rows = rows[rows.metric == "top1"]
    clean = rows[rows.setting == "clean"].set_index("image").value
    corrupted = rows[rows.setting != "clean"].groupby("image").value.mean()
    return 100 * pd.DataFrame({"clean": clean, "corrupted": corrupted}).sort_index()


def table(options: argparse.Namespace) -> None:
    root = Path(options.rows)
    before = accuracy(root / "before" / "stress")
    label = before.index.map(lambda image: CLASSES.index(image.split("/")[0]))
    runs: dict[str, dict[tuple[str, int], pd.DataFrame]] = {}
    for folder in sorted(root.glob("*-*-[0-9]")):
        variant, half, seed = folder.name.rsplit("-", 2)
        if (folder / "stress").exists():
            runs.setdefault(variant, {})[half, int(seed)] = accuracy(folder / "stress")
    print("| model | runs | unseen, clean | unseen, corrupted | seen, clean | seen, corrupted |")
    print("| --- | ---: |" + " ---: |" * 4)
    means = before.mean()
    print(f"| before, all ten classes | | {means['clean']:.1f} | {means['corrupted']:.1f} | | |")
    for variant in [name for name in VARIANTS if name in runs]:
        cells = []
        for seen in (False, True):
            for column in ("clean", "corrupted"):
                change = []
                for (half, _), after in runs[variant].items():
                    inside = np.isin(label, range(*HALVES[half])) == seen
                    change.append((after[column] - before[column])[inside].to_numpy())
                cells.append(_interval(change))
        print(f"| {VARIANTS[variant][0]} | {len(runs[variant])} | " + " | ".join(cells) + " |")


def _interval(changes: list[np.ndarray], repeats: int = 2000) -> str:
    """The mean of several runs with its 95 % interval: runs, and the images of each, are drawn anew. (The
    halves of the classes have different images.)"""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(repeats):
        runs = [changes[i] for i in rng.integers(len(changes), size=len(changes))]
        drawn.append(np.mean([rng.choice(values, len(values)).mean() for values in runs]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{np.mean([values.mean() for values in changes]):+.1f} [{low:.1f}, {high:.1f}]"


def removal(options: argparse.Namespace) -> None:
    """Removal scores before, and their changes after; several runs (seeds) of one line: comma-separated."""
    before = removal_scores(Path(options.runs[0]))
    print("| model | runs | " + " | ".join(f"`{method}`" for method in before.columns) + " |")
    print("| --- | ---: |" + " ---: |" * len(before.columns))
    cells = ["{:.1f} [{:.1f}, {:.1f}]".format(*spread(before[m].to_numpy()[None])) for m in before.columns]
    print("| before | | " + " | ".join(cells) + " |")
    for line in options.runs[1:]:
        after = [removal_scores(Path(folder)) for folder in line.split(",")]
        cells = [
            "{:+.1f} [{:.1f}, {:.1f}]".format(
                *spread(np.stack([(found[method] - before[method]).to_numpy() for found in after]))
            )
            for method in before.columns
        ]
        first = Path(line.split(",")[0])
        name = first.parent.name if first.name == "verify" else first.name
        print(f"| {name} | {len(after)} | " + " | ".join(cells) + " |")


def removal_scores(folder: Path) -> pd.DataFrame:
    """Rows: images; columns: methods; the mean of the four removal scores."""
    rows = sg.Rows.read(folder).to_pandas()
    return rows[rows.metric.isin(REMOVAL)].pivot_table("value", "image", "method").sort_index()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    todo = parser.add_subparsers(required=True)
    make = todo.add_parser("run")
    make.add_argument("--cifar10", required=True)
    make.add_argument("--out", required=True)
    make.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    make.set_defaults(go=run)
    show = todo.add_parser("table")
    show.add_argument("rows")
    show.set_defaults(go=table)
    beside = todo.add_parser("removal")
    beside.add_argument("runs", nargs="+")
    beside.set_defaults(go=removal)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
