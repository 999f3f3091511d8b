"""Removal scores of DINOv2 at two image sizes, with and without test-time registers.

    python -m benchmarks.panel.sizes --pets FOLDER --dinov2 FILE --rows docs/evidence/rows/dinov2_sizes
        [--methods NAME,...] [--classes 8]
    python -m benchmarks.panel.sizes --rows docs/evidence/rows/dinov2_sizes        # only the table

The probe was trained at 224 pixels and is used at both sizes. The images are those of the panel: number 16 of
each of some evenly spaced breeds. Register neurons are found on the first image of each of 24 breeds, at 518
pixels, as in benchmarks/registers.py. One run folder for each size and model; killed runs resume.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

import steadygaze as sg
from benchmarks.panel import load_probe, selection
from benchmarks.panel.measure import REMOVAL
from benchmarks.panel.tables import HEADS, difference, read_scores, text_with_interval
from benchmarks.registers import FINE, transform
from steadygaze.methods.registry import DEFAULT

SIZES = (224, FINE)
METHODS = (DEFAULT, "gaze_removal", "gae", "decompx+skipplus", "random")
AS_IT_IS, REGISTERS = "as it is", "registers"


def run(pets: Path, weights: Path, rows: Path, methods: list[str], classes: int) -> None:
    index = pd.read_csv(pets / "index.csv")
    first = index[index.groupby("breed").cumcount() == 0]
    probe = load_probe(weights, FINE)
    found = sg.find_registers(
        probe.model, [str(pets / file) for file in first.image], transform=transform(FINE)
    )
    print(found, flush=True)
    with selection(pets / "images", 1, 16, classes) as data:
        for size in SIZES:
            loaded = load_probe(weights, size)
            inserted = replace(loaded, model=sg.modules.insert(loaded.model, registers=found))
            for name, model in ((AS_IT_IS, loaded), (REGISTERS, inserted)):
                out = rows / f"{size}-{name.replace(' ', '-')}"
                sg.verify(model, data, methods, list(REMOVAL), out=out, random=False, batch_size=4)


def table(rows: Path) -> str:
    """One line for each size, model and method; the change that registers make, with its interval."""
    heads = " | ".join((*HEADS, "mean", "registers − as it is"))
    lines = [f"| pixels | model | method | {heads} |", "| ---: | --- | --- |" + " ---: |" * (len(HEADS) + 2)]
    for size in SIZES:
        plain, inserted = (
            read_scores(rows / f"{size}-{name.replace(' ', '-')}") for name in (AS_IT_IS, REGISTERS)
        )
        assert plain is not None and inserted is not None, f"no rows of {size} pixels in {rows}"
        for name, scores in ((AS_IT_IS, plain), (REGISTERS, inserted)):
            for method in sorted(scores.values, key=lambda m: -scores.mean(m).mean()):
                values = scores.values[method]
                change = ""
                if name == REGISTERS:
                    change = text_with_interval(*difference([values - plain.values[method]]))
                cells = " | ".join(f"{x:.1f}" for x in (*np.mean(values, axis=0), values.mean()))
                lines.append(f"| {size} | {name} | `{method}` | {cells} | {change} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--dinov2", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=[*METHODS])
    parser.add_argument("--classes", type=int, default=8)
    given = parser.parse_args()
    if given.pets is not None and given.dinov2 is not None:
        run(given.pets, given.dinov2, given.rows, given.methods, given.classes)
    print(table(given.rows))


if __name__ == "__main__":
    main()
