"""Learned methods, which are listed only where they were trained: each against others on the same images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.panel.ranking import ranked
from benchmarks.panel.tables import read_all

ROWS = Path("docs/evidence/rows")
RUNS = {  # folder -> (method, model, training)
    "shapley_cifar": ("vit_shapley", "embedded", "750 steps of 32 images"),
    "diffmask_cifar": ("diffmask", "embedded", "9,000 steps of 16 images"),
    "diffmask_deit": ("diffmask", "deit_tiny", "1,000 steps of 4 images"),
}
ABOUT = """\
Learned methods ([vit_shapley](evidence/shapley.md), [diffmask](evidence/diffmask.md)) have rows where they
were trained, on other images than the rest of this page. Mean of the four removal scores, with the 95 %
interval of the learned method; the last columns are other methods on the same images."""
COMPARED = ("gaze_removal", "gaze", "gae", "rollout", "random")


def learned_table(root: Path = ROWS) -> str:
    """Markdown: mean of the four removal scores, and of other methods in the same rows."""
    lines = [
        ABOUT,
        "",
        f"| method | model | training | images | removal | {' | '.join(COMPARED)} |",
        f"| --- | --- | --- | ---: | ---: |{' ---: |' * len(COMPARED)}",
    ]
    for folder, (method, model, training) in RUNS.items():
        scores = read_all(root / folder)
        assert scores is not None, folder
        column = {name: scores.mean(name) for name in scores.values}
        entry = next(e for e in ranked([column], method) if e.method == method)
        others = [f"{np.mean(column[name]):.1f}" if name in column else "" for name in COMPARED]
        lines.append(
            f"| `{method}` | {model} | {training} | {scores.images} | "
            f"{entry.value:.1f} [{entry.low:.1f}, {entry.high:.1f}] | {' | '.join(others)} |"
        )
    return "\n".join(lines)
