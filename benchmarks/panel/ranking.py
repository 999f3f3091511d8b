"""Ranks with intervals, from rows of several models.

Each model has one number for each method and image. A method's value is its mean over the images of a model,
then over models. A method that was measured on some of a model's images only is compared with a reference
method that has the most of them, on the images that both have:

    value = mean of the reference over all its images + mean over shared images of (method − reference)

which for a method with the same images is its mean. Intervals are 95 % by bootstrap: images are drawn with
replacement inside each model, the same for all methods, and all values and ranks are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steadygaze.runs.request import CEILING, CHANCE, SEARCHED

REPEATS = 2000
Column = Mapping[str, np.ndarray]  # method -> (images,), NaN where an image was not measured


@dataclass(frozen=True)
class Entry:
    """A method's place. rank: interval of the rank; level_with: the first and the last place whose paired
    difference to this method has an interval that contains 0."""

    method: str
    value: float
    low: float
    high: float
    rank: tuple[int, int]
    level_with: tuple[int, int]


def ranked(models: Sequence[Column], reference: str, repeats: int = REPEATS) -> list[Entry]:
    """The methods that every model has, the highest value first.

    >>> scores = {"good": np.array([3.0, 4.0, 5.0]), "bad": np.array([1.0, np.nan, 2.0])}
    >>> [(entry.method, round(entry.value, 2)) for entry in ranked([scores], "good")]
    [('good', 4.0), ('bad', 1.5)]
    """
    first, *others = models
    methods = [m for m in first if all(m in column and _shared(column, m, reference) for column in models)]
    draws, values = np.zeros((repeats, len(methods))), np.zeros(len(methods))
    rng = np.random.default_rng(0)
    for column in (first, *others):
        compared = ~np.isnan(column[reference])
        base = column[reference][compared]
        images = len(base)
        change = np.stack([column[m][compared] - base for m in methods], axis=1)  # (images, methods)
        measured = ~np.isnan(change)
        change = np.where(measured, change, 0.0)
        shared = measured.sum(0)
        counts = rng.multinomial(images, [1 / images] * images, size=repeats)
        drawn = np.maximum(counts @ measured, 1)  # a draw without any of a method's images says nothing
        draws += ((counts @ base / images)[:, None] + counts @ change / drawn) / len(models)
        values += (base.mean() + change.sum(0) / shared) / len(models)
    order = (-values).argsort(kind="stable")
    draws = draws[:, order]
    ranks = (-draws).argsort(axis=1).argsort(axis=1) + 1
    entries = []
    for place, i in enumerate(order):
        low, high = np.percentile(draws[:, place], [2.5, 97.5])
        best, worst = np.percentile(ranks[:, place], [2.5, 97.5])
        below, above = np.percentile(draws - draws[:, [place]], [2.5, 97.5], axis=0)
        level = np.flatnonzero((below <= 0) & (above >= 0)) + 1  # itself too
        entries.append(
            Entry(
                methods[i],
                float(values[i]),
                float(low),
                float(high),
                (round(best), round(worst)),
                (int(level[0]), int(level[-1])),
            )
        )
    return entries


def with_ceiling(models: Sequence[Column], reference: str) -> list[Entry]:
    """The methods and the ceiling, the best that searched orders (`greedy:...`) reach on each image. All are
    of the images that were searched, of the models that have any. Empty if none has.

    >>> nan = np.nan
    >>> searched = {"greedy": np.array([6, 4, nan]), "greedy:by=deletion": np.array([5, 7, nan])}
    >>> entries = with_ceiling([{"good": np.arange(3.0), **searched}], "good")
    >>> [(entry.method, entry.value) for entry in entries]
    [('ceiling', 6.5), ('greedy:by=deletion', 6.0), ('greedy', 5.0), ('good', 0.5)]
    """
    found = []
    for column in models:
        searched = [values for name, values in column.items() if name.partition(":")[0] == SEARCHED]
        if len(searched) > 1:
            best = np.max(searched, axis=0)
            images = ~np.isnan(best)
            found.append({name: x[images] for name, x in column.items()} | {CEILING: best[images]})
    return ranked(found, reference) if found else []


def shares(entries: Sequence[Entry]) -> dict[str, float]:
    """(value − chance) / (ceiling − chance) of each method, in percent; empty without both.

    >>> values = {"random": 50.0, "good": 80.0, "ceiling": 90.0}
    >>> shares([Entry(name, value, 0.0, 0.0, (1, 1), (1, 1)) for name, value in values.items()])["good"]
    75.0
    """
    values = {entry.method: entry.value for entry in entries}
    if not {CHANCE, CEILING} <= set(values):
        return {}
    chance, top = values[CHANCE], values[CEILING]
    return {name: 100 * (value - chance) / (top - chance) for name, value in values.items()}


def _shared(column: Column, method: str, reference: str) -> bool:
    """Whether both have a value for at least one image."""
    return not np.isnan(column[method] - column[reference]).all()


def interval(first: int, last: int) -> str:
    """
    >>> interval(2, 4), interval(3, 3)
    ('2–4', '3')
    """
    return f"{first}–{last}" if first != last else str(first)
