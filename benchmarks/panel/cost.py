"""Measured cost of every method in forward passes: `python -m benchmarks.panel.cost docs/evidence/rows/panel`

CPU time of one thread of `explain`, relative to a forward pass of the same batch without gradients, which is
timed before and after; median of the rounds. A ViT of DeiT-Tiny's size with random weights, which do not
change the cost. Writes cost.json; `benchmarks.explain` measures wall time of two threads for fewer methods.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

import steadygaze as sg
from benchmarks.panel.methods import available, white_box

FILE = "cost.json"
BATCH = 2


def read_costs(rows: Path) -> dict[str, float]:
    """Measured forward passes by method; empty without a file."""
    file = rows / FILE
    if not file.exists():
        return {}
    costs: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))["forward passes"]
    return costs


def measured(methods: list[str], rounds: int) -> dict[str, float]:
    """Median ratio of each method."""
    model = timm.create_model("deit_tiny_patch16_224").eval()
    images = torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    vit = sg.adapt(model)

    def unit() -> None:
        with torch.no_grad():
            model(images)

    unit()
    found = {}
    for name in available(methods, vit):
        ratios = []
        for _ in range(rounds):
            before = _cpu(unit)
            taken = _cpu(lambda name=name: sg.explain(vit, images, 1, name))
            ratios.append(2 * taken / (before + _cpu(unit)))
        found[name] = round(statistics.median(ratios), 2)
        print(f"{name}: {found[name]}", flush=True)
    return found


def _cpu(run: Callable[[], Any]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    about = f"deit_tiny_patch16_224, random weights, batch {BATCH}, one thread, torch {torch.__version__}"
    found = {"about": about, "forward passes": measured(white_box(), chosen.rounds)}
    (chosen.rows / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
