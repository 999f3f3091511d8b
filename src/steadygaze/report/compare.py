"""The page of a comparison: every number before and after, classes gained and lost, pictures that turned with their maps."""

from __future__ import annotations

from pathlib import Path

from steadygaze.method_registry import DEFAULT
from steadygaze.report.changes import CLASS_HEADS, HEADS, class_rows, corruption_figures, row
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Part
from steadygaze.report.samples import turned_pictures
from steadygaze.runs.stress_compare import Comparison
from steadygaze.runs.stress_numbers import table_csv


def write_comparison(
    found: Comparison, path: Path, *, method: str = DEFAULT, show: int = 8, pictures: bool = True
) -> list[Path]:
    """Write the page and, beside it, the numbers as .csv."""
    one, two = found.before[0], found.after[0]
    shots, why = turned_pictures(found, method, show) if pictures and show and found.turned else ({}, "")
    parts = [
        Part("What changed", "changes", text="After minus before on the same pictures; coloured: the paired 95 % interval leaves zero out.",
             figures=corruption_figures(found), heads=HEADS, rows=[row(c) for c in found.changes if c.verdict or "/" not in c.setting],
             after="Scores, and every setting that changed for sure; the others are at the end. p: McNemar's exact test of right "
             "and wrong answers."),
    ]  # fmt: skip
    if found.turned:
        text = f"Right answers by class ({found.setting}); intervals by Newcombe."
        parts.append(
            Part(
                "Classes gained and lost",
                "classes",
                text=text,
                heads=CLASS_HEADS,
                texts=1,
                rows=class_rows(found),
            )
        )
    for way, names in found.turned.items():
        more = why or (f"Maps by {method}, of the class each model says." if shots.get(way) else "")
        text = f"{len(names)} of the pictures ({found.setting}). {more}"
        listed = ", ".join(names[:show]) + (f" and {len(names) - show} more" if len(names) > show else "")
        parts.append(
            Part(
                f"Turned {way}",
                f"turned-{way}",
                text=text,
                shots=shots.get(way, []),
                after=listed if names else "",
            )
        )
    folded = f"{len(found.changes)} numbers before and after"
    parts.append(
        Part("All differences", "all", heads=HEADS, rows=[row(c) for c in found.changes], folded=folded)
    )
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
