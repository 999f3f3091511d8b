"""Rebuild a table of docs/evidence from its rows: python -m benchmarks.evidence RUN [--baseline METHOD --score SCORE] [--top N]

Prints Markdown: the four removal scores (percent, higher is better), their mean, and its paired difference to the baseline with a
95 % bootstrap interval over the pictures.
"""

import argparse
from pathlib import Path

import numpy as np

import steadygaze as sg

REMOVAL = ["insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--baseline", default="decompx+skipplus")
    parser.add_argument("--score", default="logit")
    parser.add_argument("--top", type=int)
    chosen = parser.parse_args()
    rows = sg.Rows.read(chosen.run).to_pandas()
    wide = rows[rows.metric.isin(REMOVAL)].pivot_table(index="image", columns=["method", "score", "metric"], values="value").dropna()
    lines = list(dict.fromkeys((m, s) for m, s, _ in wide.columns))
    mean = {line: wide[line][REMOVAL].mean(axis=1).to_numpy() for line in lines}
    base = mean[chosen.baseline, chosen.score]
    draw = np.random.default_rng(0).integers(0, len(base), (4000, len(base)))
    print(f"{len(base)} pictures; difference to {chosen.baseline} on the {chosen.score}\n")
    print("| method | score | insertion accuracy | deletion accuracy | insertion AOPC | deletion AOPC | mean | difference |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for line in sorted(lines, key=lambda line: -mean[line].mean())[: chosen.top]:
        four = " | ".join(f"{wide[line][name].mean():.1f}" for name in REMOVAL)
        change = mean[line] - base
        low, high = np.percentile(change[draw].mean(1), [2.5, 97.5])
        interval = "" if line == (chosen.baseline, chosen.score) else f" {change.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
        print(f"| {line[0]} | {line[1]} | {four} | {mean[line].mean():.1f} |{interval} |")


if __name__ == "__main__":
    main()
