"""The panel's tables, from rows: scores of each model, means over models, differences with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import steadygaze as sg
from benchmarks.panel import PanelModel
from benchmarks.panel.measure import REMOVAL, run_folders
from benchmarks.panel.methods import SAME_MAP, own_scores
from steadygaze.faithfulness.inputs import RATIOS

REPEATS = 2000
AOPC = ("insertion_aopc", "deletion_aopc")
HEADS = ("insertion accuracy", "deletion accuracy", "insertion AOPC", "deletion AOPC")


@dataclass(frozen=True)
class Scores:
    """The values of one model: (images, metrics) of every method; NaN where an image was not measured."""

    images: int
    metrics: tuple[str, ...]
    values: dict[str, np.ndarray]

    def mean(self, method: str) -> np.ndarray:
        """The mean of the metrics of each image."""
        return self.values[method].mean(1)


def read_scores(folder: Path, metrics: tuple[str, ...] = REMOVAL) -> Scores | None:
    """The rows of all run folders below `folder`: methods that have every image. None without rows."""
    found = read_all(folder, metrics)
    if found is None:
        return None
    complete = {name: x for name, x in found.values.items() if not np.isnan(x).any()}
    return Scores(found.images, metrics, complete)


def read_all(
    folder: Path,
    metrics: tuple[str, ...] = REMOVAL,
    earlier: Sequence[Path] = (),
    patches: int | None = None,
) -> Scores | None:
    """The same for every method, also for those that were measured on some of the images only.

    earlier: run folders of the same model that were measured before the panel; of these, the leaderboard's
    methods with their own score
    patches: of the model; with them, `srg` is made from the curves of both AOPC metrics
    """
    parts = [sg.Rows.read(run).to_pandas() for run in run_folders(folder)]
    for run in earlier:
        part = sg.Rows.read(run).to_pandas()
        part["method"] = part["method"].replace(SAME_MAP)
        own = own_scores()
        parts.append(part[part["method"].map(own) == part["score"]])
    if not parts:
        return None
    rows = pd.concat([part[part.metric.isin((*metrics, *AOPC))] for part in parts])
    rows = rows.drop_duplicates(["image", "method", "metric"])
    if "srg" in metrics and patches:
        rows = _srg_rows(rows, patches)
    rows = rows[rows.metric.isin(metrics)]
    if rows.empty:
        return None
    wide = rows.pivot_table(index="image", columns=["method", "metric"], values="value", dropna=False)
    methods = [name for name in dict.fromkeys(rows.method) if all((name, m) in wide for m in metrics)]
    values = {name: wide[name][list(metrics)].to_numpy(float) for name in methods}
    return Scores(len(wide), metrics, values)


def _srg_rows(rows: pd.DataFrame, patches: int) -> pd.DataFrame:
    """`srg` of rows that have the curves of both AOPC metrics over RATIOS."""
    key = ["image", "method"]
    insertion, deletion = (rows[rows.metric == name].set_index(key)["detail"] for name in AOPC)
    both = pd.concat([insertion, deletion], axis=1, keys=AOPC, join="inner").dropna()
    values = [srg_of_curves(*curves, patches) for curves in both.itertuples(index=False)]
    return both.index.to_frame(index=False).assign(metric="srg", value=values)


def srg_of_curves(insertion: Sequence[float], deletion: Sequence[float], patches: int) -> float:
    """The symmetric relevance gain from curves of AOPC over RATIOS.

    At a ratio r deletion removes k = int(r P) patches; what is lost with the k least important removed, P - k
    kept, is interpolated between the shares that insertion keeps, and the whole image, where nothing is lost.

    >>> round(srg_of_curves([40, 35, 30, 25, 20, 15, 10, 5, 0], [5, 10, 15, 20, 25, 30, 35, 40, 45], 100), 6)
    5.0
    """
    counts = [int(r * patches) for r in RATIOS]
    lost = np.interp([patches - k for k in counts], [*counts, patches], [*insertion, 0.0])
    return float(np.trapezoid(np.asarray(deletion) - lost, RATIOS) / (RATIOS[-1] - RATIOS[0]))


def print_tables(folders: Mapping[str, Path], models: Mapping[str, PanelModel], reference: str) -> None:
    """Markdown: one table for each model, then over the models whose patches can be removed."""
    scores = {name: found for name, folder in folders.items() if (found := read_scores(folder)) is not None}
    for name, model_scores in scores.items():
        how = "true removal" if models[name].removable else "hidden from attention"
        print(f"\n### {name}: {model_scores.images} images, {how}\n")
        print(f"| method | {' | '.join(HEADS)} | mean |\n| --- |{' ---: |' * (len(HEADS) + 1)}")
        for method in sorted(model_scores.values, key=lambda m: -model_scores.mean(m).mean()):
            cells = [*model_scores.values[method].mean(0), model_scores.mean(method).mean()]
            print(f"| {method} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
    removable = {name: found for name, found in scores.items() if models[name].removable}
    if removable:
        _print_overall(removable, reference)


def _print_overall(scores: Mapping[str, Scores], reference: str) -> None:
    common = [m for m in next(iter(scores.values())).values if all(m in s.values for s in scores.values())]
    means = {m: np.mean([s.values[m].mean(0) for s in scores.values()], axis=0) for m in common}
    heads = " | ".join(HEADS)
    print(f"\n### Mean over {len(scores)} models whose patches can be removed\n")
    print(f"| method | {heads} | mean |\n| --- |{' ---: |' * (len(HEADS) + 1)}")
    for method in sorted(common, key=lambda m: -means[m].mean()):
        print(f"| {method} | {' | '.join(f'{v:.1f}' for v in (*means[method], means[method].mean()))} |")
    if reference not in common:
        return
    print(f"\n| {reference} minus | {heads} | mean |\n| --- |{' ---: |' * (len(HEADS) + 1)}")
    for method in (m for m in common if m != reference):
        changes = [s.values[reference] - s.values[method] for s in scores.values()]
        cells = [text_with_interval(*difference(changes, column)) for column in (*range(len(HEADS)), None)]
        print(f"| {method} | {' | '.join(cells)} |")


def difference(changes: list[np.ndarray], column: int | None = None) -> tuple[float, float, float]:
    """Mean over models of the paired change, and its 95 % interval: images drawn inside each model.

    changes: (images, metrics) of each model; column: one metric, or None for the mean of all
    """
    rng = np.random.default_rng(0)
    total = np.zeros(REPEATS)
    value = 0.0
    for change in changes:
        each = change.mean(1) if column is None else change[:, column]
        drawn = rng.multinomial(len(each), [1 / len(each)] * len(each), size=REPEATS)
        total += drawn @ each / len(each) / len(changes)
        value += float(each.mean()) / len(changes)
    low, high = np.percentile(total, [2.5, 97.5])
    return value, float(low), float(high)


def text_with_interval(value: float, low: float, high: float) -> str:
    """
    >>> text_with_interval(1.26, -0.5, 3.0)
    '+1.3 [-0.5, +3.0]'
    """
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
