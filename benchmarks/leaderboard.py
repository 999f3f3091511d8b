"""Write docs/leaderboard.md and its figure from the panel's rows.

    python -m benchmarks.leaderboard [docs/evidence/rows/panel] [--out docs/leaderboard.md]

Everything is computed from committed rows, which `python -m benchmarks.panel` adds to. Methods are ranked by
the mean of the four removal scores, averaged over the models whose patches can be removed. The interval of a
rank comes from a bootstrap: images are drawn with replacement inside each model, and the methods are ranked
anew. A method is "level with" the one above it if the 95 % interval of their paired difference contains 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import steadygaze as sg
from benchmarks.panel import panel
from benchmarks.panel.tables import REPEATS, Scores, difference, read_scores, text_with_interval
from steadygaze.runs.cost.declared import forward_passes

OTHER = {  # column -> (metrics, how they become one number per image)
    "SRG": (("srg",), lambda x: x[:, 0]),
    "SaCo": (("saco",), lambda x: x[:, 0]),
    "perturbation": (("negative_perturbation", "positive_perturbation"), lambda x: x[:, 0] - x[:, 1]),
    "AP": (("average_precision",), lambda x: x[:, 0]),
    "known truth": (("truth_auroc",), lambda x: 100 * x[:, 0]),
}
MEANING = {
    "SRG": "area between least-first and most-first removal",
    "SaCo": "do larger scores have larger effects, -1 to 1",
    "perturbation": "accuracy with the least relevant pixels black minus with the most relevant ones, points",
    "AP": "localisation: average precision of the object's pixels",
    "known truth": "AUROC of the patches that decide, in a task where they are known",
}
SHOWN_IN_FIGURE = 20


@dataclass(frozen=True)
class Entry:
    """One line of the leaderboard."""

    method: str
    mean: float
    low: float
    high: float
    rank: tuple[int, int]
    level_with_previous: bool


def ranked(scores: Mapping[str, Scores]) -> list[Entry]:
    """The methods that every model has, best first."""
    methods = [m for m in next(iter(scores.values())).values if all(m in s.values for s in scores.values())]
    draws = np.zeros((REPEATS, len(methods)))
    rng = np.random.default_rng(0)
    for model in scores.values():
        each = np.stack([model.mean(m) for m in methods], axis=1)  # (images, methods)
        counts = rng.multinomial(model.images, [1 / model.images] * model.images, size=REPEATS)
        draws += counts @ each / model.images / len(scores)
    means = {m: float(np.mean([s.mean(m).mean() for s in scores.values()])) for m in methods}
    ranks = (-draws).argsort(axis=1).argsort(axis=1) + 1
    entries: list[Entry] = []
    for method in sorted(methods, key=lambda m: -means[m]):
        i = methods.index(method)
        low, high = np.percentile(draws[:, i], [2.5, 97.5])
        first, last = np.percentile(ranks[:, i], [2.5, 97.5])
        level = False
        if entries:
            above = entries[-1].method
            change = [(s.values[above] - s.values[method]) for s in scores.values()]
            level = difference(change)[1] <= 0
        entries.append(Entry(method, means[method], low, high, (round(first), round(last)), level))
    return entries


def other_columns(folders: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """column -> method -> mean over the models that have it."""
    columns: dict[str, dict[str, float]] = {}
    for name, (metrics, number) in OTHER.items():
        found = [s for folder in folders.values() if (s := read_scores(folder, metrics)) is not None]
        if not found:
            continue
        methods = {m for scores in found for m in scores.values}
        columns[name] = {
            m: float(np.mean([number(s.values[m]).mean() for s in found if m in s.values])) for m in methods
        }
    return columns


def markdown(root: Path) -> tuple[str, list[Entry]]:
    """The page, and the ranking for the figure."""
    models = panel()
    folders = {name: root / name for name in models}
    every = {name: scores for name, folder in folders.items() if (scores := read_scores(folder)) is not None}
    scores = {name: s for name, s in every.items() if models[name].removable}
    entries, columns = ranked(scores), other_columns(folders)
    costs = {entry.method: forward_passes(sg.method(entry.method)) for entry in entries}
    lines = [_introduction(scores, columns), *_ranking(entries, columns, costs), *_by_model(every, entries)]
    return "\n".join([*lines, _own_method()]) + "\n", entries


def _introduction(scores: Mapping[str, Scores], columns: Mapping[str, object]) -> str:
    counts = ", ".join(f"{name} ({s.images})" for name, s in scores.items())
    return f"""# Leaderboard

The methods that were measured on these models of the [panel](evidence/default.md#the-panel), from committed
rows. This page is written by `python -m benchmarks.leaderboard`; the rows by `python -m benchmarks.panel`,
which adds methods, models and measures.

![Mean of the four removal scores, with 95 % intervals](images/leaderboard.png)

**Removal** is the mean of the four removal scores (insertion and deletion, accuracy and AOPC; true token
removal, nine ratios, in percent, higher is better), averaged over the models whose patches can be removed:
{counts}; number of images in brackets. Intervals are 95 % by bootstrap over the images inside each model.
**Rank** is the interval of the rank under the same draws. A method marked **=** is level with the one above
it: the interval of their paired difference contains 0, so that their order is not shown. **Cost** is in
forward passes of one image.
{_columns_text(columns)}"""


def _columns_text(columns: Mapping[str, object]) -> str:
    if not columns:
        return ""
    meanings = "; ".join(f"**{name}** ({MEANING[name]})" for name in columns)
    return f"\nOther columns, means over the models that have them, higher is better: {meanings}.\n"


def _ranking(
    entries: Sequence[Entry], columns: Mapping[str, Mapping[str, float]], costs: Mapping[str, float]
) -> list[str]:
    heads = ["", "method", "cost", "removal", "rank", *columns]
    lines = ["## Ranking", "", f"| {' | '.join(heads)} |", "| --- | --- |" + " ---: |" * (len(heads) - 2)]
    for place, entry in enumerate(entries, 1):
        first, last = entry.rank
        cells = [
            f"{place}{' =' if entry.level_with_previous else ''}",
            f"`{entry.method}`",
            f"{costs[entry.method]:g}",
            f"{entry.mean:.1f} [{entry.low:.1f}, {entry.high:.1f}]",
            f"{first}–{last}" if first != last else str(first),
            *(_number(column.get(entry.method), name) for name, column in columns.items()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _number(value: float | None, column: str) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if column == "SaCo" else f"{value:.1f}"


def _by_model(scores: Mapping[str, Scores], entries: Sequence[Entry]) -> list[str]:
    names = list(scores)
    lines = ["", "## By model", "", "Mean of the four removal scores of each model.", ""]
    lines += [f"| method | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    order = [entry.method for entry in entries]
    order += sorted({m for s in scores.values() for m in s.values} - set(order))
    for method in order:
        cells = [f"{s.mean(method).mean():.1f}" if method in s.values else "" for s in scores.values()]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    if len(entries) > 1:
        best, pairs = entries[0].method, []
        for entry in entries[1:6]:
            change = [s.values[best] - s.values[entry.method] for s in scores.values() if best in s.values]
            pairs.append(f"{text_with_interval(*difference(change))} over `{entry.method}`")
        lines += ["", f"`{best}`, paired differences: {'; '.join(pairs)}."]
    return lines


def _own_method() -> str:
    return """
## Add your own method

A method is a function of a trace. Register it, measure it on the panel, and write this page again:

```python
# mine.py
import steadygaze as sg


@sg.register_method("mine", "map", family="gradient", aggregator="plus", score="log_odds")
def mine(trace, layer):
    x, g = trace.patches(layer)  # x^l and its gradient, (B, rows, columns, channels)
    return (x * g).sum(-1).relu()
```

```sh
python -c "import mine, runpy; runpy.run_module('benchmarks.panel', run_name='__main__')" \\
    --rows docs/evidence/rows/panel --cifar10 cifar10/test --methods mine --reference mine
python -m benchmarks.leaderboard
```

A method is ranked when every model has rows of it: give `--imagenet` and `--weights` too, or compare on the
CIFAR-10 models alone with `--models`."""


def draw(entries: Sequence[Entry], path: Path) -> None:
    """The figure: a point with its interval for each of the best methods."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = list(entries[:SHOWN_IN_FIGURE])[::-1]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(shown) + 1.2), dpi=150)
    values = np.array([entry.mean for entry in shown])
    errors = np.array([[e.mean - e.low, e.high - e.mean] for e in shown]).T
    colours = ["#c2410c" if entry.method.startswith("gaze") else "#94a3b8" for entry in shown]
    names = [entry.method for entry in shown]
    axes.grid(axis="x", color="#e2e8f0")
    axes.set_axisbelow(True)
    for place, (value, error, colour) in enumerate(zip(values, errors.T, colours, strict=True)):
        axes.errorbar(value, place, xerr=error[:, None], fmt="o", color=colour, capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(max(0, min(e.low for e in shown) - 3), max(e.high for e in shown) + 2)
    axes.set_xlabel("mean of four removal scores over the panel (%, higher is better; 95 % intervals)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="?", default=Path("docs/evidence/rows/panel"))
    parser.add_argument("--out", type=Path, default=Path("docs/leaderboard.md"))
    chosen = parser.parse_args()
    text, entries = markdown(chosen.rows)
    chosen.out.write_text(text, encoding="utf-8")
    draw(entries, chosen.out.parent / "images" / "leaderboard.png")
    print(f"{len(entries)} methods: {chosen.out}")


if __name__ == "__main__":
    main()
