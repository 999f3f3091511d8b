"""What the pages of a comparison share: a change as a row, a class as a row, error by corruption as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steadygaze.report.figures import draw
from steadygaze.report.page import Cell, Figure
from steadygaze.robustness.by_class import ClassChange, Spread
from steadygaze.runs.compare import Change, Comparison
from steadygaze.runs.messages import plural

HEADS = ["setting", "metric", "before", "after", "difference", "p", "images", "note"]
CLASS_HEADS = ["class", "before", "after", "difference", "gained", "lost", "images"]
STYLES = {"better": "good", "worse": "sure"}
HEADLINES = (  # setting and metric of the first sentence of a page, the most important first
    ("clean", "top1"),
    ("clean", "miou"),
    ("corruptions", "mean_error"),
    ("corruptions", "mean_miou"),
)


def short_list(changes: Sequence[Change]) -> list[Change]:
    """Without each severity, frame and value: what a person reads first; the rest is in the file."""
    return [change for change in changes if not change.setting.minor]


def sentence(comparison: Comparison) -> str:
    """What changed, and for which images and classes, in one sentence."""
    changes = {change.key: change for change in comparison.changes}
    known = [changes[key] for key in HEADLINES if key in changes][:2] or short_list(comparison.changes)[:1]
    card = comparison.before[0]
    images = f"On {plural(card.image_count, 'image')} of {card.data}, " if card.image_count else ""
    text = f"{images}{' and '.join(map(_change_text, known))}"
    if not comparison.turned:
        return f"{text}."
    counts = [len(comparison.turned.get(way, ())) for way in ("right", "wrong")]
    turned = f"{plural(counts[0], 'image is', 'images are')} newly correct and {counts[1]} newly wrong"
    return f"{text}: {turned} ({comparison.setting}), {_classes_text(comparison)}."


def _change_text(change: Change) -> str:
    quantity, scale = change.quantity, change.scale
    before, after = (quantity.text(side.mean) for side in (change.before, change.after))
    moved = f"{'rises' if change.difference > 0 else 'falls'} from {before} to {after}"
    moved = f"{moved if change.difference else f'stays at {after}'} {quantity.unit}".rstrip()
    gap, low, high = (f"{scale * value:+.3g}" for value in (change.difference, change.low, change.high))
    sure = change.verdict or "no significant change"
    return f"{quantity.title} ({change.setting.label}) {moved} ({sure}: {gap}, 95 % interval {low} to {high})"


def _classes_text(comparison: Comparison) -> str:
    """Which classes gained or lost significantly; at most three of each."""
    parts = []
    for verdict, ordered in (("gained", comparison.classes[::-1]), ("lost", comparison.classes)):
        names = [_class_name(comparison, c) for c in ordered if c.verdict == verdict]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} {verdict} significantly")
    return "; ".join(parts) or "and no single class gained or lost significantly"


def _class_name(comparison: Comparison, change: ClassChange) -> str:
    return comparison.class_names.get(change.label, "").split(",")[0] or f"class {change.label}"


def row(change: Change) -> list[Cell]:
    """Cells below `HEADS`."""
    quantity, scale = change.quantity, change.scale
    span = f"{scale * change.low:+.3g} to {scale * change.high:+.3g}"
    p = change.p
    return [
        Cell(change.setting.label, change.setting.label),
        Cell(f"{quantity.title}{quantity.arrow}", quantity.name),
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
