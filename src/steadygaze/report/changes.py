"""What the pages of a comparison share: a change as a row, a class as a row, error by corruption as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steadygaze.report.figures import draw
from steadygaze.report.page import Cell, Figure
from steadygaze.robustness.by_class import Spread
from steadygaze.runs.compare import Change, Comparison

HEADS = ["setting", "metric", "before", "after", "difference", "p", "images", "note"]
CLASS_HEADS = ["class", "before", "after", "difference", "gained", "lost", "images"]
STYLES = {"better": "good", "worse": "sure"}


def short_list(changes: Sequence[Change]) -> list[Change]:
    """Without each severity, frame and value: what a person reads first; the rest is in the file."""
    return [change for change in changes if not change.setting.minor]


def row(change: Change, *, titles: bool = False) -> list[Cell]:
    """Cells below `HEADS`. titles: the metric's name for people."""
    quantity, scale = change.quantity, change.scale
    span = f"{scale * change.low:+.3g} to {scale * change.high:+.3g}"
    p = change.p
    return [
        Cell(change.setting.label, change.setting.label),
        Cell(quantity.title if titles else quantity.name, quantity.name),
        _side(change.before, scale),
        _side(change.after, scale),
        Cell(f"{scale * change.difference:+.3g}", change.difference, STYLES.get(change.verdict, ""), span),
        Cell("" if p is None else f"{p:.3f}", "" if p is None else p),
        Cell(str(change.images), change.images),
        Cell(change.note, change.note),
    ]


def _side(spread: Spread, scale: float) -> Cell:
    text = "no number" if math.isnan(spread.mean) else f"{scale * spread.mean:.4g}"
    several = f"± {scale * spread.deviation:.2g} over {spread.seeds} seeds" if spread.seeds > 1 else ""
    return Cell(text, spread.mean, "", several)


def class_rows(comparison: Comparison) -> list[list[Cell]]:
    """Cells below `CLASS_HEADS`: the classes with any image gained or lost."""
    rows = []
    for c in comparison.classes:
        if not c.gained and not c.lost:
            continue
        class_name = comparison.class_names.get(c.label, "").split(",")[0]
        name = f"{c.label} {class_name}".strip()
        style = {"gained": "good", "lost": "sure"}.get(c.verdict, "")
        span = f"{100 * c.low:+.0f} to {100 * c.high:+.0f}"
        gap = Cell(f"{100 * c.difference:+.0f}", c.difference, style, span)
        sides = [Cell(f"{100 * side.value:.0f}", side.value) for side in (c.before, c.after)]
        rows.append([Cell(name, name), *sides, gap, *(Cell(str(n), n) for n in (c.gained, c.lost, c.count))])
    return rows


def change_figures(comparison: Comparison) -> list[Figure]:
    """What suites draw of both models."""
    suites = comparison.before[0].suites
    return [draw(figure) for suite in suites for figure in suite.change_figures(comparison.changes)]
