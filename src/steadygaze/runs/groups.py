"""Accuracy by group of images, in every setting of a stress run (docs/equations.md#worst-group).

The group of an image is the note of its rows; run.json names the columns of the data that define it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from steadygaze.robustness.groups import group_accuracy
from steadygaze.runs.card import Card
from steadygaze.runs.settings import CLEAN, TOP1, BarChart, Score, Setting, Table, accuracy, bar
from steadygaze.runs.statistics import resampled_share

WORST_GROUP = accuracy("worst_group", "worst-group accuracy")
SHOWN = 20  # groups in tables, figures and comparisons, the worst first


def group_scores(card: Card) -> Iterator[Score]:
    """The accuracy of each group and of the worst one; of clean images and under every other setting."""
    if card.groups is None:
        return
    groups = np.array(card.groups)
    for setting in card.measured_settings(metric=TOP1.name):
        if setting.population or setting.minor:
            continue
        values = card.values(setting.label, TOP1.name)
        known = ~np.isnan(values) & (groups != "")
        if not known.any():
            continue
        accuracies = group_accuracy(values[known], groups[known].tolist())
        order = sorted(accuracies, key=lambda group: accuracies[group].value)
        resampled = {}
        for rank, group in enumerate(order):
            own = known & (groups == group)
            resampled[group] = resampled_share(values, own, card.repeats, card.seed)
            label = f"{setting.label}/{group}"
            minor = setting != CLEAN or rank >= SHOWN
            title = f"{setting.words} ({group.replace('=', ': ')})"
            part = Setting(setting.suite, group, None, "", label, minor=minor, title=title)
            yield Score(part, TOP1, resampled[group], int(own.sum()), "group", shares=values[own])
        worst = known & (groups == order[0])
        # the worst group of each resampled data set: it may be another one
        samples = np.fmin.reduce(list(resampled.values()))
        note = f"{order[0]}, {f'the worst of {len(order)} groups' if len(order) > 1 else 'the only group'}"
        count = int(worst.sum())
        yield Score(setting, WORST_GROUP, samples, count, note, headline=True, shares=values[worst])


def group_tables(card: Card) -> Iterator[Table]:
    """The clean accuracy of each group, the worst first."""
    numbers = [number for number in card.scores.values() if _is_clean_group(number.setting)]
    if not numbers:
        return
    rows = [[number.setting.name, number.text(), str(number.images)] for number in numbers[:SHOWN]]
    more = f", the worst {SHOWN} of {len(numbers)}" if len(numbers) > SHOWN else ""
    yield Table(f"accuracy by group, clean, %{more}", ["group", TOP1.title, "images"], rows)


def group_figures(card: Card) -> Iterator[BarChart]:
    """The clean accuracy of each group, the worst first."""
    numbers = [number for number in card.scores.values() if _is_clean_group(number.setting)]
    if numbers:
        bars = [bar(number, number.setting.name.replace("=", ": "), 1) for number in numbers[:SHOWN]]
        bars.append(bar(card.numbers[CLEAN.label, TOP1.name], "all images", 2))
        caption = "clean images, the worst group first; whiskers are 95 % intervals"
        yield BarChart("Accuracy by group", bars, "accuracy, %", caption, highest=100)


def _is_clean_group(setting: Setting) -> bool:
    return setting.suite == CLEAN.suite and setting.label != CLEAN.label
