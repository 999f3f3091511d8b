"""Which methods find what a ViT with hand-set weights really uses? The tables and the figure of
docs/evidence/ground_truth.md.

    python -m benchmarks.ground_truth --figure docs/images/ground_truth.png

Prints the correlation of every method without training with the true importance, by task (`steadygaze verify
--suite ground_truth` prints the same for methods that you name). About a minute on one core.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import pandas as pd
import torch

import steadygaze as sg
from benchmarks.panel.methods import white_box
from steadygaze.faithfulness.ground_truth import (
    TASKS,
    hand_set_vit,
    importance_correlation,
    without_rounding,
)
from steadygaze.runs.ground_truth import POOLS, summary

SEARCHES = ("occlusion", "kernel_shap:budget=400")
SHOWN = (
    "raw_attention",
    "rollout",
    "gae",
    "vanilla_grad",
    "attnlrp",
    "gaze_outline",
    "occlusion",
    SEARCHES[1],
)
IMAGES = 12  # of each task
FOUND = 0.95  # a correlation from which on a task counts as solved


def tables(methods: list[str], images: int) -> pd.DataFrame:
    """Correlation by task with the class token; its mean with mean pooling; share on the distractor; solved
    tasks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # maps without any evidence: their correlation is 0
        rows = sg.verify(suite="ground_truth", methods=methods, limit=images)
    correlation = summary(rows)
    token, mean = POOLS["token"], POOLS["avg"]
    table = correlation.loc[token].copy()
    table["mean pooling"] = correlation.loc[mean, "mean"]
    table["on distractor, %"] = summary(rows, "distractor_share").loc[token, "mean"]
    both = correlation.drop(columns="mean") >= FOUND
    table["solved"] = both.loc[token].sum(axis=1) + both.loc[mean].sum(axis=1)
    return table.sort_values(["solved", "mean"], ascending=False)


def markdown(table: pd.DataFrame) -> str:
    columns = [column for column in table.columns if column != "solved"]
    heading = "| method | solved of 14 | " + " | ".join(columns) + " |"
    lines = [heading, "| --- |" + " ---: |" * (len(columns) + 1)]
    for method, row in table.iterrows():
        cells = [
            "-" if pd.isna(row[c]) else f"{row[c]:.0f}" if "%" in c else f"{round(row[c], 2) + 0.0:.2f}"
            for c in columns
        ]
        lines.append(f"| `{method}` | {row['solved']:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """A row for each task: the image, the true importance, and the maps of some methods (class token)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = ["image", "true importance", *SHOWN]
    size = (1.25 * len(columns), 1.36 * len(TASKS))
    figure, axes = plt.subplots(len(TASKS), len(columns), figsize=size, dpi=130)
    for line, (name, task) in zip(axes, TASKS.items(), strict=True):
        model = hand_set_vit(name)
        images = task.draw(3, torch.Generator().manual_seed(2))[2:]
        maps = {"true importance": model.ground_truth.importance(images)[0]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for method in SHOWN:
                scores = sg.explain(model, images, target=1, method=method).scores
                maps[method] = without_rounding(scores[None])[0, 0]
        line[0].imshow((images[0] / 2 + 0.5).permute(1, 2, 0))
        for axis, column in zip(line[1:], columns[1:], strict=True):
            high = float(maps[column].abs().max()) or 1.0
            axis.imshow(maps[column].detach(), cmap="RdBu_r", vmin=-high, vmax=high)
            wrong = _correlation(maps[column], maps["true importance"]) < FOUND
            for spine in axis.spines.values():
                spine.set(color="#dc2626" if wrong else "#94a3b8", linewidth=2.2 if wrong else 0.8)
        line[0].set_ylabel(name, fontsize=10, fontweight="bold")
        for axis in line:
            axis.set(xticks=[], yticks=[])
    for axis, column in zip(axes[0], columns, strict=True):
        axis.set_title(column.replace(":", ":\n").replace("true ", "true\n"), fontsize=8.5)
    figure.suptitle(
        "What the model uses is known; which method finds it?  Red: evidence for, blue: against. "
        f"Red frame: correlation below {FOUND}",
        x=0.02, ha="left", fontsize=10.5,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.985), pad=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _correlation(scores: torch.Tensor, true: torch.Tensor) -> float:
    return float(importance_correlation(without_rounding(scores[None, None]), true[None]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", type=Path, help="where to draw the figure")
    parser.add_argument("--methods", default="", help="comma-separated; default: all without training")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each task")
    options = parser.parse_args()
    methods = options.methods.split(",") if options.methods else [*white_box(), *SEARCHES]
    print(markdown(tables(methods, options.images)))
    if options.figure is not None:
        draw(options.figure)


if __name__ == "__main__":
    main()
