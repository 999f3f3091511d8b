"""The measures of the leaderboard: which rows they read, and how they become one number for each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.panel import EARLIER, PanelModel
from benchmarks.panel.measure import MEASURES, REMOVAL
from benchmarks.panel.ranking import Column
from benchmarks.panel.tables import Scores, read_all
from benchmarks.panel.truth import FOLDER, TASKS

Number = Callable[[np.ndarray], np.ndarray]  # (images, metrics) -> (images,)


@dataclass(frozen=True)
class Measure:
    """title: head of the column; about: one line for the page; digits: decimals that are shown; models: those
    that it is of, by name, if not of all"""

    title: str
    about: str
    metrics: tuple[str, ...]
    number: Number
    digits: int = 1
    models: tuple[str, ...] = ()


def _one(index: int) -> Number:
    return lambda x: x[:, index]


REMOVAL_MEAN = Measure(
    "removal", "mean of the four removal scores, points", REMOVAL, lambda x: np.asarray(x.mean(1))
)
FOUR = tuple(
    Measure(name.replace("_", " ").replace("aopc", "AOPC"), "", REMOVAL, _one(i))
    for i, name in enumerate(REMOVAL)
)
SRG = Measure(
    "SRG",
    "area between the curves of the class probability with the least and with the most important patches "
    "removed first, points; the first curve is interpolated from the shares that insertion keeps",
    ("srg",),
    _one(0),
)
SACO = Measure(
    "SaCo",
    "whether groups of patches with higher scores lose more when removed, −1 to 1",
    MEASURES["saco"],
    _one(0),
    2,
)
PERTURBATION = Measure(
    "pixels",
    "pixel perturbation: accuracy with the least relevant pixels black minus with the most relevant ones "
    "black, points",
    MEASURES["perturbation"],
    lambda x: x[:, 1] - x[:, 0],
)
LOCALIZATION = Measure(
    "AP",
    "localization: average precision of the object's pixels, DeiT-Tiny on pets with masks, %",
    MEASURES["localization"],
    _one(0),
    models=("deit_tiny",),
)
LOCALIZATION_DINOV2 = replace(
    LOCALIZATION, title="AP, DINOv2", about="the same of DINOv2 with its probe, %", models=("dinov2",)
)
TRUTH = {
    "counting": "AUROC of the red cells where the class is their number",
    "shortcut": "AUROC of the marked cell where its color is the class",
}
KNOWN_TRUTH = {name: Measure(name, about, MEASURES["truth"], _one(0), 2) for name, about in TRUTH.items()}
assert set(TRUTH) == set(TASKS)


def column_of(measure: Measure, scores: Mapping[str, Scores]) -> dict[str, Column]:
    """model -> method -> one number for each image."""
    return {
        name: {method: measure.number(x) for method, x in model.values.items()}
        for name, model in scores.items()
    }


def all_columns(root: Path, models: Mapping[str, PanelModel]) -> dict[Measure, dict[str, Column]]:
    """Every measure that has rows, of the models whose patches can be removed."""
    removable = [name for name, model in models.items() if model.removable]
    found: dict[Measure, dict[str, Column]] = {}
    single = (SRG, SACO, PERTURBATION, LOCALIZATION, LOCALIZATION_DINOV2)
    for group in ((REMOVAL_MEAN, *FOUR), *((measure,) for measure in single)):
        names = [name for name in removable if not group[0].models or name in group[0].models]
        scores = read_each(root, names, group[0].metrics, {name: models[name].patches for name in names})
        found |= {measure: column_of(measure, scores) for measure in group}
    for name, measure in KNOWN_TRUTH.items():
        found[measure] = column_of(measure, read_each(root / FOLDER, [name], measure.metrics))
    return {measure: by_model for measure, by_model in found.items() if by_model}


def read_each(
    root: Path, names: Sequence[str], metrics: tuple[str, ...], patches: Mapping[str, int] | None = None
) -> dict[str, Scores]:
    """The scores of the models that have rows of these metrics, with rows from before the panel."""
    found = {}
    for name in names:
        earlier = [root.parent / folder for folder in EARLIER.get(name, ())]
        earlier = [path for path in earlier if path.exists()]
        found[name] = read_all(root / name, metrics, earlier, patches and patches[name])
    return {name: scores for name, scores in found.items() if scores is not None}
