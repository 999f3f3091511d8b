"""Before and after: two models on the same pictures under the same settings.

Every number is after minus before, over the pictures and settings that both have: means over corruptions and the like too. The
interval is paired (the same draws for both), so one without zero is a real difference. With several seeds a side, each picture
counts with its mean over them, and each side's own spread from seed to seed is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steadygaze.data.benchmarks import some
from steadygaze.errors import BadInput, UnknownName
from steadygaze.robustness.by_class import ClassChange, Spread, class_changes, mcnemar, over_seeds, turned
from steadygaze.runs.rows import Row, Rows
from steadygaze.runs.statistics import interval
from steadygaze.runs.stress_card import Card
from steadygaze.runs.stress_numbers import better, percent
from steadygaze.runs.stress_suite import APART

SAME = (
    "data", "pictures_hash", "shifts", "backgrounds", "neighbours", "batch", "shares", "pgd_steps", "salient", "preprocessing", "device",
    "versions",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One number before and after; difference with its paired 95 % interval; p: McNemar's, of right and wrong answers of one
    seed."""

    setting: str
    metric: str
    before: Spread
    after: Spread
    difference: float
    low: float
    high: float
    images: int
    p: float | None
    note: str

    @property
    def verdict(self) -> str:
        """better, worse, more, less where the interval leaves zero out; otherwise nothing."""
        if not (self.low > 0 or self.high < 0):
            return ""
        way = better(self.metric)
        if not way:
            return "more" if self.difference > 0 else "less"
        return "better" if (self.difference > 0) == (way == "higher") else "worse"

    @property
    def scale(self) -> float:
        return 100.0 if percent(self.metric) else 1.0


@dataclass(frozen=True)
class Comparison:
    """What changed. classes and turned are of `setting`, between the first run of each side; empty of segmenters."""

    before: list[Card]
    after: list[Card]
    changes: list[Change]
    setting: str
    classes: list[ClassChange]
    class_names: dict[int, str]
    turned: dict[str, list[str]]
    counts: dict[str, int]
    notes: list[str]

    def records(self) -> list[dict[str, Any]]:
        """One dict for each number."""
        return [
            {
                "setting": c.setting, "metric": c.metric, "before": c.before.mean, "after": c.after.mean, "difference": c.difference,
                "low": c.low, "high": c.high, "verdict": c.verdict, "p": "" if c.p is None else c.p, "images": c.images,
                "seeds_before": c.before.seeds, "deviation_before": c.before.deviation, "seeds_after": c.after.seeds,
                "deviation_after": c.after.deviation, "note": c.note,
            }
            for c in self.changes
        ]  # fmt: skip


def compare(before: Sequence[str | Path], after: Sequence[str | Path], *, setting: str = "clean", repeats: int = 2000,
            seed: int = 0) -> Comparison:  # fmt: skip
    """Compare the runs of two models, one folder or one for each seed a side."""
    sides = [_rows(before), _rows(after)]
    notes = [*_differences([run for side in sides for run in side.runs]), *_seeds(sides)]
    names = [_images(side) for side in sides]
    common = set.intersection(*(images for side in names for images in side))
    if not common:
        raise BadInput(
            f"{_called(before)} and {_called(after)} have no picture in common: give runs over the same data"
        )
    for side, folders in zip(names, (before, after), strict=True):
        for images, folder in zip(side, folders, strict=True):
            if len(images) > len(common):
                notes.append(
                    f"{folder}: {len(images) - len(common)} of its {len(images)} pictures are not in all runs, and are left out"
                )
    cards, left = _paired(sides, common, repeats, seed)
    notes += left
    _same_labels(cards)
    shared = [
        key for key in cards[0][0].numbers if all(key in card.numbers for side in cards for card in side)
    ]
    if not shared:
        raise BadInput(f"{_called(before)} and {_called(after)} have no setting in common")
    changes = [_change(cards, key) for key in shared]
    if not any(
        metric == "top1" for card in (cards[0][0], cards[1][0]) for _, metric in card.keys
    ):  # segmenters give no answer to turn
        return Comparison(cards[0], cards[1], changes, setting, [], {}, {}, {}, notes)
    if (setting, "top1") not in shared:
        raise UnknownName(
            "setting", setting, [s for s, m in shared if m == "top1"], "It must have been run of both models."
        )
    one, two = cards[0][0], cards[1][0]
    pictures, right, labels = _answers(one, two, setting)
    found = turned(pictures, *right)
    known = {**one.run.get("about", {}).get("classes", {}), **two.run.get("about", {}).get("classes", {})}
    return Comparison(
        cards[0], cards[1], changes, setting, class_changes(labels, *right), {int(k): v for k, v in known.items()},
        found, {way: len(which) for way, which in found.items()}, notes,
    )  # fmt: skip


def _rows(folders: Sequence[str | Path]) -> Rows:
    rows = Rows.read(*folders)
    if rows.kinds != {"stress"}:
        raise BadInput(
            f"{_called(folders)}: expected runs of steadygaze stress, got a run of verify: compare those with steadygaze report"
        )
    weights = {(run["settings"]["model"], run["settings"]["weights"]) for run in rows.runs}
    seeds = [run["settings"]["seed"] for run in rows.runs]
    if len(folders) > 1 and len(weights) < len(folders) and len(set(seeds)) < len(seeds):
        raise BadInput(
            f"{_called(folders)}: expected runs of several seeds, got the same model with the same seed twice"
        )
    return rows


def _called(folders: Sequence[str | Path]) -> str:
    return ", ".join(map(str, folders))


def _images(rows: Rows) -> list[set[str]]:
    found: list[set[str]] = [set() for _ in rows.runs]
    for number, row in rows.everything():
        if "unreadable" not in row:
            found[number].add(row["image"])
    if not all(found):
        raise BadInput(f"{_called(rows.folders)}: a run has no row yet. Let steadygaze stress run first.")
    return found


def _paired(
    sides: Sequence[Rows], common: set[str], repeats: int, seed: int
) -> tuple[list[list[Card]], list[str]]:
    """The cards of both sides, of what every run has measured of every picture alone, and what had to be left out for it."""
    cards = [
        Card.of(side, repeats=repeats, seed=seed, take=lambda row: row["image"] in common) for side in sides
    ]
    every = [card for side in cards for card in side]
    shared = set.intersection(*(set(card.keys) for card in every))
    lost = {key: found for key in shared if (found := set().union(*(card.without(key) for card in every)))}
    notes = []
    for side, which in zip(cards, ("before", "after"), strict=True):
        alone = sorted(
            {setting for card in side for setting, _ in card.keys} - {setting for setting, _ in shared}
        )
        if alone:
            notes.append(f"only {which}: {some(alone)}")
    if lost:
        most = {
            setting: max(len(found) for key, found in lost.items() if key[0] == setting)
            for setting, _ in lost
        }
        each = some(f"{setting} {count}" for setting, count in sorted(most.items()))
        notes.append(
            f"pictures that some run lacks, and that are left out: {each}. A run that is not finished, or numbers that are NaN?"
        )
    if not lost and all(set(card.keys) == shared for card in every):
        return cards, notes

    def both(row: Row) -> bool:
        key = row["setting"], row["metric"]
        return row["image"] in common and key in shared and row["image"] not in lost.get(key, ())

    return [Card.of(side, repeats=repeats, seed=seed, take=both) for side in sides], notes


def _seeds(sides: Sequence[Rows]) -> list[str]:
    """What is drawn at random is the same before and after only with the same seeds."""
    seeds = [sorted(run["settings"]["seed"] for run in side.runs) for side in sides]
    random = any(set(run["settings"].get("suite", ())) - set(APART) for side in sides for run in side.runs)
    if seeds[0] == seeds[1] or not random:
        return []
    one, two = (", ".join(map(str, side)) for side in seeds)
    return [
        f"other seeds before ({one}) than after ({two}): corruptions and all else that is drawn at random differ between the sides"
    ]


def _differences(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What the runs were made with that is not the same."""
    notes = []
    for key in SAME:
        values = [
            value for run in runs if (value := run["settings"].get(key)) not in (None, [])
        ]  # those that used it
        if any(value != values[0] for value in values[1:]):
            shown = "; ".join(dict.fromkeys(_words(value) for value in values))
            notes.append(f"not the same in all runs: {key} ({shown})")
    return notes


def _words(value: Any) -> str:
    text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _same_labels(cards: list[list[Card]]) -> None:
    first = cards[0][0].answers
    for card in (card for side in cards for card in side):
        for image, (label, _) in card.answers.items():
            if image in first and first[image][0] != label:
                raise BadInput(
                    f"{image} has the label {first[image][0]} in one run and {label} in another: their classes do not map"
                )


def _change(cards: list[list[Card]], key: tuple[str, str]) -> Change:
    setting, metric = key
    sides = [[card.numbers[key] for card in side] for side in cards]
    samples = [np.mean([n.samples for n in side], axis=0) for side in sides]
    gap = samples[1] - samples[0]
    low, high = interval(gap[1:])
    p = None
    if (
        metric.startswith(("top1", "knn"))
        and key in cards[0][0].measured
        and len(cards[0]) == len(cards[1]) == 1
    ):
        one, two = (side[0].values(setting, metric) for side in cards)
        both = ~np.isnan(one + two) & np.isin(one, (0, 1)) & np.isin(two, (0, 1))
        p = mcnemar(one[both], two[both]) if both.any() else None
    spreads = [
        over_seeds([n.value for n in side]) if all(np.isfinite(n.value) for n in side) else None
        for side in sides
    ]
    nothing = Spread(float("nan"), float("nan"), float("nan"), float("nan"), 0)
    first = sides[0][0]
    return Change(setting, metric, spreads[0] or nothing, spreads[1] or nothing, float(gap[0]), float(low), float(high), first.images, p,
                  first.note)  # fmt: skip


def _answers(
    one: Card, two: Card, setting: str
) -> tuple[list[str], tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The pictures of a setting that both answered: names, right before and after, labels."""
    names = one.names_of(one.population(setting))
    first, second = one.values(setting, "top1"), two.values(setting, "top1")
    known = [i for i in range(len(names)) if not np.isnan(first[i] + second[i]) and names[i] in one.answers]
    if not known:
        raise BadInput(f"{setting}: no picture was answered by both models")
    labels = np.array([one.answers[names[i]][0] for i in known])
    return [names[i] for i in known], (first[known], second[known]), labels
