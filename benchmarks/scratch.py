"""Effect of CB, TAP and ADL on accuracy, robustness and attention: python -m benchmarks.scratch rows | table

    rows STRESS... --runs RUNS --out FILE.csv.gz     from folders of runs of `steadygaze stress` and of
                                                     `steadygaze train`, one run for each model in all of
                                                     them, named VARIANT-SEED (baseline-0, ...)
    table FILE.csv.gz                                print a table of docs/evidence from the rows

The tables: a small ViT trained from scratch on CIFAR-10 (docs/evidence/training.md), DeiT-Tiny fine-tuned on
Tiny-ImageNet (docs/evidence/tiny_imagenet.md), and a linear probe compared with fine-tuning
(docs/evidence/probe.md). A row is one image of one model with its measurements; a measurement with several
settings (corruptions) is their mean. The first one is the model's accuracy on all test images at the end of
training. The first rows of a table are the model before fine-tuning, if it was
measured, and the baseline; the others are differences to the baseline, with 95 % bootstrap intervals over
images and seeds, paired by image.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import steadygaze as sg
from benchmarks.measure import spread
from steadygaze.robustness import CORRUPTIONS

BEFORE, BASELINE = "before", "baseline"
VARIANTS = {
    BEFORE: "before fine-tuning",
    "baseline": "baseline",
    "cb": "CB",
    "cb-scaled": "CB_S",
    "tap": "TAP",
    "adl": "ADL",
    "tap-adl": "TAP and ADL",
    "probe": "linear probe",
    "tuned": "fine-tuned with a new head",
    "relevance": "then with relevance",
}
TEST = "top-1 of all, %"
MEASURES: list[
    tuple[str, str, str, float]
] = [  # title, settings ("corrupted": every corruption), metric, factor
    ("clean top-1, %", "clean", "top1", 100.0),
    ("corruption error, %", "corrupted", "error", 100.0),
    ("FGSM 1/255 top-1, %", "fgsm/1", "top1", 100.0),
    ("FGSM 4/255 top-1, %", "fgsm/4", "top1", 100.0),
    ("FGSM 8/255 top-1, %", "fgsm/8", "top1", 100.0),
    ("center hidden, top-1, %", "center_square/0.5", "top1", 100.0),
    ("random patches dropped, top-1, %", "random_drop", "drop_right", 100.0),
    ("object moved, top-1, %", "location", "top1", 100.0),
    ("rotated, top-1, %", "rotation", "top1", 100.0),
    ("resized, top-1, %", "size", "top1", 100.0),
    ("on another background, top-1, %", "background", "top1", 100.0),
    ("10-NN, %", "neighbors", "knn10", 100.0),
    ("entropy, nats", "clean", "attention_entropy", 1.0),
    ("stability, cosine", "corrupted", "attention_stability", 1.0),
    ("cosine of two heads", "clean", "attention_head_similarity", 1.0),
    ("cosine of two tokens", "clean", "attention_token_similarity", 1.0),
]

# columns of earlier files -> their names now
RENAMED = {"random patches dropped, right, %": "random patches dropped, top-1, %", "picture": "image"}


def by_image(rows: pd.DataFrame, settings: str, metric: str) -> pd.Series:
    """The mean of a measure over its settings, for each image."""
    there = (
        rows.setting.str.partition("/")[0].isin(CORRUPTIONS)
        if settings == "corrupted"
        else (rows.setting == settings) | rows.setting.str.startswith(settings + "/")
    )
    found = (
        rows[there & (rows.metric == ("top1" if metric == "error" else metric))].groupby("image").value.mean()
    )
    return 1 - found if metric == "error" else found


def gather(options: argparse.Namespace) -> None:
    models = []
    for run in sorted(p.name for p in Path(options.folders[0]).iterdir() if p.is_dir()):
        variant, _, seed = run.rpartition("-")
        rows = pd.concat([sg.Rows.read(Path(folder) / run).to_pandas() for folder in options.folders])
        if "note" in rows:  # tokens of a model with TAP cannot be removed: another measurement
            rows = rows[rows.note != "attention masking"]
        measures = pd.DataFrame(
            {title: factor * by_image(rows, settings, metric) for title, settings, metric, factor in MEASURES}
        ).dropna(axis=1, how="all")
        log = Path(options.runs) / run / "log.csv"
        measures[TEST] = 100 * pd.read_csv(log).test_top1.dropna().iloc[-1] if log.exists() else np.nan
        models.append(measures.rename_axis("image").reset_index().assign(variant=variant, seed=int(seed)))
    pd.concat(models).round(5).to_csv(options.out, index=False)
    print(f"{len(models)} models -> {options.out}")


def table(options: argparse.Namespace) -> None:
    rows = (
        pd.read_csv(options.rows).rename(columns=RENAMED).set_index(["variant", "seed", "image"]).sort_index()
    )
    titles = [title for title in (TEST, *(measure[0] for measure in MEASURES)) if title in rows]
    print("| model | seeds | " + " | ".join(titles) + " |\n| --- | ---: |" + " ---: |" * len(titles))
    base = rows.loc[BASELINE]
    for name in [n for n in VARIANTS if n in rows.index.levels[0]]:
        own, absolute = rows.loc[name], name in (BEFORE, BASELINE)
        seeds = sorted(set(own.index.get_level_values(0)) & set(base.index.get_level_values(0)))
        cells = []
        for title in titles:
            each = np.stack([own.loc[s][title] - (0 if absolute else base.loc[s][title]) for s in seeds])
            measured = each[:, ~np.isnan(each).any(0)]  # attention may be measured on fewer images
            if not measured.size:
                cells.append("")
                continue
            mean, low, high = spread(measured)
            digits, sign = (1 if title.endswith("%") else 3), "" if absolute else "+"
            interval = (
                f" [{low:.{digits}f}, {high:.{digits}f}]" if high > low else ""
            )  # one value alone: none
            cells.append(f"{mean:{sign}.{digits}f}{interval}")
        print(f"| {VARIANTS[name]} | {len(seeds)} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    todo = parser.add_subparsers(required=True)
    keep = todo.add_parser("rows")
    keep.add_argument("folders", nargs="+")
    keep.add_argument("--runs", required=True)
    keep.add_argument("--out", required=True)
    keep.set_defaults(go=gather)
    show = todo.add_parser("table")
    show.add_argument("rows")
    show.set_defaults(go=table)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
