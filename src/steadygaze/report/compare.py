"""The page of a comparison: every number before and after, classes gained and lost, changed images with their
maps."""

from __future__ import annotations

from pathlib import Path

from steadygaze.report.changes import CLASS_HEADS, HEADS, change_figures, class_rows, row, sentence
from steadygaze.report.figures import records_csv
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Part
from steadygaze.report.samples import shots_of
from steadygaze.runs.compare import Comparison
from steadygaze.runs.messages import plural
from steadygaze.runs.untrusted.json_files import damaged_files

TURNED = {"wrong": "Newly wrong", "right": "Newly correct"}
FIRST = (
    "After minus before on {images}. ↑: higher is better; ↓: lower is better. Coloured: the paired 95 % "
    "interval excludes zero."
)
NOTE = (
    "Scores, and every setting with a significant change; the others are at the end. p: McNemar's exact "
    "test of correct and wrong predictions; – where a row has none."
)


def write_comparison(comparison: Comparison, path: Path, *, show: int = 8, images: bool = True) -> list[Path]:
    """Write the page and, beside it, the numbers as .csv; returns the files."""
    with damaged_files(*folders_of(comparison)):
        return _write(comparison, path, show, images)


def folders_of(comparison: Comparison) -> list[Path]:
    """The run folders that are compared."""
    cards = (*comparison.before, *comparison.after)
    return [card.folder for card in cards if card.folder is not None]


def _write(comparison: Comparison, path: Path, show: int, images: bool) -> list[Path]:
    one, two = comparison.before[0], comparison.after[0]
    parts = [
        Part(
            "What changed",
            "changes",
            text=FIRST.format(images=comparison.images_text),
            figures=change_figures(comparison),
            heads=HEADS,
            rows=[row(c) for c in comparison.changes if c.verdict or c.setting.level is None],
            after=NOTE,
        )
    ]
    if comparison.turned:
        parts.append(classes_part(comparison))
        parts += turned_parts(comparison, show if images else 0, show)
    folded = f"{len(comparison.changes)} numbers before and after"
    everything = [row(c) for c in comparison.changes]
    parts.append(Part("All differences", "all", heads=HEADS, rows=everything, folded=folded))
    page = rendered(
        "card.html",
        [card.run for card in (*comparison.before, *comparison.after)],
        title="Before and after",
        about=f"{one.model} {two.model}",
        leads=[sentence(comparison), lead(comparison), *comparison.notes],
        parts=parts,
        beside=f"{path.with_suffix('.csv').name} in the same folder contains the numbers.",
    )
    return write_all({path: page, path.with_suffix(".csv"): records_csv(comparison.records())})


def lead(comparison: Comparison) -> str:
    """Which models, on what."""
    one, two = comparison.before[0], comparison.after[0]
    models = f"Before: {one.model} ({one.weights}). After: {two.model} ({two.weights})."
    return f"{models} {one.image_count} images of {one.data}."


def classes_part(comparison: Comparison) -> Part:
    """The classes gained and lost."""
    text = f"Accuracy by class ({comparison.setting}); intervals by Newcombe."
    rows = class_rows(comparison)
    empty = "" if rows else "No class has a newly correct or newly wrong image."
    title = "Classes gained and lost"
    return Part(title, "classes", text=text, heads=CLASS_HEADS, texts=1, rows=rows, empty=empty)


def turned_parts(comparison: Comparison, shown: int, listed: int) -> list[Part]:
    """The images that are newly wrong and newly correct: how many, their names, and maps of those the runs
    stored."""
    shots, text = shots_of(comparison, comparison.turned, shown) if shown else ({}, "")
    parts = []
    for way, names in comparison.turned.items():
        more = f" and {len(names) - listed} more" if len(names) > listed else ""
        parts.append(
            Part(
                TURNED[way],
                f"turned-{way}",
                text=f"{plural(len(names), 'image')} ({comparison.setting}). {text if names else ''}".strip(),
                shots=shots.get(way, []),
                after=", ".join(names[:listed]) + more,
            )
        )
    return parts
