"""Rows of tasks whose relevant patches are known (docs/equations.md#known-truth): counting and shortcut.

A small ViT is trained on each task with seed 0, until it predicts nearly all unseen images correctly; the
training is deterministic, so that no weights are stored. truth_auroc: how often a relevant patch scores
higher than another one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import steadygaze as sg
from benchmarks.panel.methods import available
from steadygaze.data.images import names_hash
from steadygaze.faithfulness.truth import Task, counting, score, shortcut, train

TASKS = {"counting": counting, "shortcut": shortcut}
FOLDER = "known-truth"
IMAGES = 200
SEED = 0


def measure_truth(methods: list[str], rows: Path, images: int = IMAGES, steps: int = 1500) -> None:
    """Rows of the methods that have none yet, in `rows`/known-truth/TASK."""
    for name, make in TASKS.items():
        out = rows / FOLDER / name
        done = {column[0] for run in out.glob("*/run.json") for column in _columns(run.parent)}
        missing = [method for method in methods if method not in done]
        if missing:
            _measure(make(), missing, out, images, steps)


def _columns(run: Path) -> list[list[str]]:
    columns: list[list[str]] = sg.Rows.read(run).runs[0]["settings"]["columns"]
    return columns


def _measure(task: Task, methods: list[str], out: Path, images: int, steps: int) -> None:
    model, accuracy = train(task, seed=SEED, steps=steps)
    print(f"{task.name}: {100 * accuracy:.1f} % of 1,000 unseen images are correct", file=sys.stderr)
    vit = sg.adapt(model)
    batch = task.draw(images, torch.Generator().manual_seed(SEED + 99))
    assert batch.masks is not None
    defined = [bool(mask.any() and not mask.all()) for mask in batch.masks]  # others have no AUROC
    drawn, labels, masks = batch.images[defined], batch.labels[defined], batch.masks[defined]
    supported = available(methods, vit)
    if task.two_sided:
        quick = [name for name in supported if sg.method(name).base.family != "black box"]
        maps = [sg.explain(vit, drawn, target=labels, method=name).scores for name in quick]
        if score(task, torch.stack(maps), masks)[1] == "others":
            masks = 255 - masks
    data = [(drawn[i : i + 50], labels[i : i + 50], masks[i : i + 50]) for i in range(0, len(drawn), 50)]
    folder = out / names_hash(supported)[:6]
    sg.verify(vit, data, supported, "truth_auroc", mean=[0.5] * 3, std=[0.5] * 3, out=folder, random=False)
