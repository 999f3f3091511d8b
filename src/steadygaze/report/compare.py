"""The page of a comparison: every number before and after, classes gained and lost, pictures that turned with their maps."""

from __future__ import annotations

import math
from pathlib import Path

from steadygaze.registry import DEFAULT
from steadygaze.report.bars import Bar, bars
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Cell, Figure, Part
from steadygaze.report.samples import turned_pictures
from steadygaze.robustness.corruptions import CORRUPTIONS
from steadygaze.runs.stress_compare import Change, Comparison
from steadygaze.runs.stress_numbers import table_csv

HEADS = ["setting", "metric", "before", "after", "difference", "p", "pictures", "note"]
LOOK = {"better": "good", "worse": "sure"}


def write_comparison(found: Comparison, path: Path, *, method: str = DEFAULT, show: int = 8, pictures: bool = True) -> list[Path]:
    """Write the page and, beside it, the numbers as .csv."""
    one, two = found.before[0], found.after[0]
    shots, why = turned_pictures(found, method, show) if pictures and show else ({}, "")
    parts = [
        Part("What changed", "changes", text="After minus before on the same pictures; coloured: the paired 95 % interval leaves zero out.",
             figures=_figures(found), heads=HEADS, rows=[_row(c) for c in found.changes if c.verdict or "/" not in c.setting],
             after="Scores, and every setting that changed for sure; the others are at the end. p: McNemar's exact test of right "
             "and wrong answers."),
        Part("Classes gained and lost", "classes", text=f"Right answers by class ({found.setting}); intervals by Newcombe.",
             heads=["class", "before", "after", "difference", "gained", "lost", "pictures"], texts=1, rows=_classes(found)),
    ]  # fmt: skip
    for way in ("wrong", "right"):
        names = found.turned[way]
        more = why or (f"Maps by {method}, of the class each model says." if shots.get(way) else "")
        text = f"{len(names)} of the pictures ({found.setting}). {more}"
        listed = ", ".join(names[:show]) + (f" and {len(names) - show} more" if len(names) > show else "")
        parts.append(Part(f"Turned {way}", f"turned-{way}", text=text, shots=shots.get(way, []), after=listed if names else ""))
    folded = f"{len(found.changes)} numbers before and after"
    parts.append(Part("All differences", "all", heads=HEADS, rows=[_row(c) for c in found.changes], folded=folded))
    models = f"Before: {one.model} ({one.weights}). After: {two.model} ({two.weights})."
    page = rendered(
        "card.html",
        [card.run for card in (*found.before, *found.after)],
        title="Before and after",
        about=f"{one.model} {two.model}",
        leads=[f"{models} {one.pictures} pictures of {one.data}.", *found.notes],
        parts=parts,
        beside=f"{path.with_suffix('.csv').name} beside this file holds the numbers.",
    )
    return write_all({path: page, path.with_suffix(".csv"): table_csv(found.records())})


def _row(c: Change) -> list[Cell]:
    def side(value: float, deviation: float, seeds: int) -> Cell:
        text = "no number" if math.isnan(value) else f"{c.scale * value:.4g}"
        return Cell(text, value, "", f"± {c.scale * deviation:.2g} over {seeds} seeds" if seeds > 1 else "")

    span = f"{c.scale * c.low:+.3g} to {c.scale * c.high:+.3g}"
    gap = Cell(f"{c.scale * c.difference:+.3g}", c.difference, LOOK.get(c.verdict, ""), span)
    p = Cell("" if c.p is None else f"{c.p:.3f}", "" if c.p is None else c.p)
    return [
        Cell(c.setting, c.setting), Cell(c.metric, c.metric), side(c.before.mean, c.before.deviation, c.before.seeds),
        side(c.after.mean, c.after.deviation, c.after.seeds), gap, p, Cell(str(c.images), c.images), Cell(c.note, c.note),
    ]  # fmt: skip


def _classes(found: Comparison) -> list[list[Cell]]:
    rows = []
    for c in found.classes:
        if not c.gained and not c.lost:
            continue
        name = " ".join(filter(None, (str(c.label), found.class_names.get(c.label, "").split(",")[0])))
        look = {"gained": "good", "lost": "sure"}.get(c.verdict, "")
        gap = Cell(f"{100 * c.difference:+.0f}", c.difference, look, f"{100 * c.low:+.0f} to {100 * c.high:+.0f}")
        sides = [Cell(f"{100 * a.value:.0f}", a.value) for a in (c.before, c.after)]
        rows.append([Cell(name, name), *sides, gap, *(Cell(str(n), n) for n in (c.gained, c.lost, c.count))])
    return rows


def _figures(found: Comparison) -> list[Figure]:
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
