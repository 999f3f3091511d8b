"""Rebuild a table of docs/evidence from its rows.

    python -m benchmarks.evidence RUN... [--family removal] [--half choose|report]

Prints Markdown. Each family has one number per image that orders and compares the methods, paired over the
images, with a 95 % bootstrap interval:

    removal        the mean of the four removal scores (percent, higher is better)
    perturbation   accuracy with the least relevant pixels black minus with the most relevant ones (points)
    localization   average precision of the object's pixels (percent)

--aggregators: each method bare, with PLUS and with SkipPLUS, by that one number.
--half: every second image in the order of their names; one half serves to choose, the other to report.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import steadygaze as sg
from steadygaze.faithfulness.metric import METRICS

FAMILIES: dict[str, tuple[dict[str, str], str, Callable[[Any], Any]]] = {
    "removal": (
        {
            "insertion_accuracy": "insertion accuracy",
            "deletion_accuracy": "deletion accuracy",
            "insertion_aopc": "insertion AOPC",
            "deletion_aopc": "deletion AOPC",
        },
        "mean",
        lambda wide: wide.mean(axis=1),
    ),
    "perturbation": (
        {"positive_perturbation": "positive (lower)", "negative_perturbation": "negative (higher)"},
        "gap",
        lambda wide: wide["negative_perturbation"] - wide["positive_perturbation"],
    ),
    "localization": (
        {"average_precision": "AP", "pointing_game": "pointing game", "miou": "mIoU"},
        "AP",
        lambda wide: wide["average_precision"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--family", choices=FAMILIES, default="removal")
    parser.add_argument(
        "--baseline", default="decompx+skipplus", help="the method that the others are compared with"
    )
    parser.add_argument("--score", default="logit", help="the baseline's score")
    parser.add_argument("--half", choices=("choose", "report"))
    parser.add_argument("--top", type=int)
    parser.add_argument("--aggregators", action="store_true")
    chosen = parser.parse_args()
    names, headline, summary = FAMILIES[chosen.family]
    rows = sg.Rows.read(*chosen.runs).to_pandas()
    rows = rows[rows.metric.isin(list(names))].drop_duplicates(["image", "method", "score", "metric"])
    wide = (
        rows.pivot(index="image", columns=["method", "score", "metric"], values="value")
        .dropna()
        .sort_index()
        .sort_index(axis=1)
    )
    if chosen.half:
        wide = wide.iloc[0 if chosen.half == "choose" else 1 :: 2]
    details = (
        rows[rows.image.isin(wide.index)]
        .set_index(["method", "score", "metric", "image"])
        .detail.sort_index()
    )
    lines = list(dict.fromkeys((m, s) for m, s, _ in wide.columns))
    number = {line: summary(wide[line][list(names)]).to_numpy() for line in lines}
    draw = np.random.default_rng(0).integers(0, len(wide), (4000, len(wide)))
    if chosen.aggregators:
        aggregators(number, draw, headline)
        return
    base = number[chosen.baseline, chosen.score]
    print(f"{len(base)} images; difference of the {headline} from {chosen.baseline} on the {chosen.score}\n")
    shown = [*names.values()] + ([headline] if headline not in names.values() else [])
    print(f"| method | score | {' | '.join(shown)} | difference |")
    print(f"| --- | --- |{' ---: |' * (len(shown) + 1)}")
    for line in sorted(lines, key=lambda line: -number[line].mean())[: chosen.top]:
        values = [
            METRICS[name].combine(wide[line][name].to_numpy(), list(details[(*line, name)][wide.index]))
            for name in names
        ]
        values += [number[line].mean()] * (len(shown) - len(values))
        interval = "" if line == (chosen.baseline, chosen.score) else f" {gap(number[line] - base, draw)}"
        print(f"| {line[0]} | {line[1]} | {' | '.join(f'{value:.1f}' for value in values)} |{interval} |")


def gap(change: np.ndarray, draw: np.ndarray) -> str:
    """The mean of paired differences with its interval."""
    low, high = np.percentile(change[draw].mean(1), [2.5, 97.5])
    return f"{change.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def aggregators(number: dict[tuple[str, str], np.ndarray], draw: np.ndarray, headline: str) -> None:
    """What PLUS adds to a method, and SkipPLUS to PLUS."""
    print(
        f"{draw.shape[1]} images; {headline}\n\n"
        "| method | alone | +plus | +skipplus | plus − alone | skipplus − plus |"
    )
    print(f"| --- |{' ---: |' * 5}")
    found = []
    for method, score in number:
        three = [number.get((method + tail, score)) for tail in ("", "+plus", "+skipplus")]
        if all(values is not None for values in three):
            found.append((method, *three))
    for method, alone, plus, skip in sorted(found, key=lambda row: -max(values.mean() for values in row[1:])):
        means = " | ".join(f"{values.mean():.1f}" for values in (alone, plus, skip))
        print(f"| {method} | {means} | {gap(plus - alone, draw)} | {gap(skip - plus, draw)} |")


if __name__ == "__main__":
    main()
