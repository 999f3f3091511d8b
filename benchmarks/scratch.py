"""What CB, TAP and ADL do to a small ViT trained from scratch: python -m benchmarks.scratch FOLDER (docs/evidence/training.md)

FOLDER holds one run of `steadygaze stress` for each model, named VARIANT-SEED (baseline-0, tap-adl-2, ...): all on the same pictures. The
first line of the table is the baseline, the others are what changed, with 95 % intervals: pictures and seeds are drawn anew, and a
picture is compared with itself.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import steadygaze as sg
from benchmarks.measure import spread
from steadygaze.robustness import CORRUPTIONS

VARIANTS = {"baseline": "baseline", "cb": "CB", "cb-scaled": "CB_S", "tap": "TAP", "adl": "ADL", "tap-adl": "TAP and ADL"}
MEASURES: list[tuple[str, str, str, float]] = [  # title, settings ("corrupted": every corruption), metric, factor
    ("clean top-1, %", "clean", "top1", 100.0),
    ("CIFAR-10-C error, %", "corrupted", "error", 100.0),
    ("FGSM 1/255 top-1, %", "fgsm/1", "top1", 100.0),
    ("FGSM 8/255 top-1, %", "fgsm/8", "top1", 100.0),
    ("centre hidden, top-1, %", "centre_square/0.5", "top1", 100.0),
    ("random patches dropped, right, %", "random_drop", "drop_right", 100.0),
    ("entropy, nats", "clean", "attention_entropy", 1.0),
    ("stability, cosine", "corrupted", "attention_stability", 1.0),
    ("head diversity", "clean", "attention_diversity", 1.0),
]


def by_picture(rows: pd.DataFrame, settings: str, metric: str) -> pd.Series:
    """The mean of a measure over its settings, for each picture."""
    there = rows.setting.str.partition("/")[0].isin(CORRUPTIONS) if settings == "corrupted" else rows.setting == settings
    found = rows[there & (rows.metric == ("top1" if metric == "error" else metric))].groupby("image").value.mean()
    return 1 - found if metric == "error" else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs: dict[str, dict[int, pd.DataFrame]] = {}
    for run in sorted(p for p in folder.iterdir() if p.is_dir()):
        name, _, seed = run.name.rpartition("-")
        runs.setdefault(name, {})[int(seed)] = sg.Rows.read(run).to_pandas()
    print("| model | seeds | " + " | ".join(title for title, *_ in MEASURES) + " |\n| --- | ---: |" + " ---: |" * len(MEASURES))
    for name in [n for n in VARIANTS if n in runs]:
        seeds = sorted(runs[name].keys() & runs["baseline"].keys())
        cells = []
        for _, settings, metric, factor in MEASURES:
            own = [by_picture(runs[name][s], settings, metric) * factor for s in seeds]
            base = [by_picture(runs["baseline"][s], settings, metric) * factor for s in seeds]
            each = np.stack([a if name == "baseline" else a - b.reindex(a.index) for a, b in zip(own, base, strict=True)])
            digits = 1 if factor == 100 else 3
            mean, low, high = spread(each)
            sign = "" if name == "baseline" else "+"
            cells.append(f"{mean:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
        print(f"| {VARIANTS[name]} | {len(seeds)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
