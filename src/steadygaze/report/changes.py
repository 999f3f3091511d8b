"""What the pages of a comparison share: a change as a row, a class as a row, error by corruption as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steadygaze.report.bars import Bar, bars
from steadygaze.report.page import Cell, Figure
from steadygaze.robustness.corruptions.corrupt import CORRUPTIONS
from steadygaze.runs.stress_compare import Change, Comparison
from steadygaze.runs.stress_numbers import label

HEADS = ["setting", "metric", "before", "after", "difference", "p", "pictures", "note"]
CLASS_HEADS = ["class", "before", "after", "difference", "gained", "lost", "pictures"]
LOOK = {"better": "good", "worse": "sure"}


def short_list(changes: Sequence[Change]) -> list[Change]:
    """Without each severity, frame and value: what a person reads first; the rest is in the file."""
    parts = tuple(f"{prefix}{name}/" for prefix in ("", "imagenet-c/") for name in CORRUPTIONS)
    return [
        c
        for c in changes
        if not c.setting.startswith((*parts, "location/", "rotation/", "size/", "sequence/"))
    ]


def row(c: Change, *, words: bool = False) -> list[Cell]:
    """Cells below `HEADS`. words: the metric's name as people write it."""

    def side(value: float, deviation: float, seeds: int) -> Cell:
        text = "no number" if math.isnan(value) else f"{c.scale * value:.4g}"
        return Cell(text, value, "", f"± {c.scale * deviation:.2g} over {seeds} seeds" if seeds > 1 else "")

    span = f"{c.scale * c.low:+.3g} to {c.scale * c.high:+.3g}"
    gap = Cell(f"{c.scale * c.difference:+.3g}", c.difference, LOOK.get(c.verdict, ""), span)
    p = Cell("" if c.p is None else f"{c.p:.3f}", "" if c.p is None else c.p)
    return [
        Cell(c.setting, c.setting), Cell(label(c.metric) if words else c.metric, c.metric),
        side(c.before.mean, c.before.deviation, c.before.seeds), side(c.after.mean, c.after.deviation, c.after.seeds),
        gap, p, Cell(str(c.images), c.images), Cell(c.note, c.note),
    ]  # fmt: skip


def class_rows(found: Comparison) -> list[list[Cell]]:
    """Cells below `CLASS_HEADS`: the classes with any picture gained or lost."""
    rows = []
    for c in found.classes:
        if not c.gained and not c.lost:
            continue
        name = " ".join(filter(None, (str(c.label), found.class_names.get(c.label, "").split(",")[0])))
        look = {"gained": "good", "lost": "sure"}.get(c.verdict, "")
        gap = Cell(
            f"{100 * c.difference:+.0f}", c.difference, look, f"{100 * c.low:+.0f} to {100 * c.high:+.0f}"
        )
        sides = [Cell(f"{100 * a.value:.0f}", a.value) for a in (c.before, c.after)]
        rows.append([Cell(name, name), *sides, gap, *(Cell(str(n), n) for n in (c.gained, c.lost, c.count))])
    return rows


def corruption_figures(found: Comparison) -> list[Figure]:
    """Error by corruption of both models, one bar below the other."""
    changes = [c for c in found.changes if c.metric == "error" and c.setting in CORRUPTIONS]
    rows = []
    for c in changes:
        name = c.setting.replace("_", " ")
        for words, spread, rank in ((f"{name}, before", c.before, 1), ("after", c.after, 0)):
            rows.append(Bar(words, 100 * spread.mean, 100 * spread.low, 100 * spread.high, rank))
    if not rows:
        return []
    chart = bars(rows, x_label="top-1 error, mean over severities, %", title="before and after", highest=100)
    return [Figure("Error by corruption", "whiskers, if any: from the lowest to the highest seed", chart)]
