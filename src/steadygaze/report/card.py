"""The page of `steadygaze card`: accuracy, robustness, attention, faithfulness, maps side by side, classes gained and lost."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steadygaze.method_registry import DEFAULT
from steadygaze.report.changes import (
    CLASS_HEADS,
    HEADS,
    LOOK,
    class_rows,
    corruption_figures,
    row,
    short_list,
)
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Cell, Part
from steadygaze.report.samples import turned_pictures
from steadygaze.runs.card import Shift
from steadygaze.runs.stress_compare import Comparison
from steadygaze.runs.stress_numbers import table_csv
from steadygaze.runs.wording import label, number

TILES = (
    ("clean", "top1", "top-1, clean"), ("corruptions", "mean_error", "error under corruptions"), ("corruptions", "mce", "mCE"),
    ("corruptions", "attention_stability", "attention stability"), ("clean", "attention_entropy", "attention entropy"),
)  # fmt: skip
LOOKS = (
    "Entropy: how spread out attention is. Stability: how like that of the clean picture it stays under corruption. Overfocus, Gini and "
    "peak: what the most seen tokens take; distance: how far it looks, in patches; diversity: how alike heads are (lower: more diverse)."
)
FAITHFUL = (
    "How true the maps are of each model, by removing patches in their order; of the removal scores, higher is truer. A difference may "
    "come from the model: one that is surer, or leans on fewer patches, loses more when they go."
)


def write_card(found: Comparison, shifts: Sequence[Shift], path: Path, runs: Sequence[dict[str, Any]], *, method: str = DEFAULT,
               show: int = 6, pictures: bool = True, masked: Sequence[bool] = (False, False)) -> list[Path]:  # fmt: skip
    """Write the page and, beside it, both tables as .csv. masked: whether patches were hidden, not removed; before, and after."""
    one, two = found.before[0], found.after[0]
    first = short_list(found.changes)
    looks = [row(c, words=True) for c in first if c.metric.startswith("attention_")]
    rest = [row(c, words=True) for c in first if not c.metric.startswith("attention_")]
    shots, why = samples(found, method, show) if pictures and show else ({}, "")
    parts = [
        Part("At a glance", "glance", tiles=_tiles(found, shifts), text="Before → after, on the same pictures."),
        Part("Accuracy and robustness", "robustness", heads=HEADS, figures=corruption_figures(found), rows=rest,
             after="After minus before; coloured: the paired 95 % interval leaves zero out. p: McNemar's exact test."),
        Part("Attention", "attention", heads=HEADS, rows=looks, text=LOOKS),
        Part("Faithfulness", "faithfulness", heads=["method", "metric", "before", "after", "difference", "pictures"],
             rows=[_faithful(s) for s in shifts], text=FAITHFUL + _masked(*masked)),
        Part("Maps side by side", "maps", shots=shots.get("samples", []), text=why or f"By {method}, of the class each model says."),
        Part("Classes gained and lost", "classes", heads=CLASS_HEADS, texts=1, rows=class_rows(found),
             text=f"Right answers by class ({found.setting}); intervals by Newcombe."),
    ]  # fmt: skip
    for way in ("wrong", "right"):
        names = found.turned[way]
        text = f"{len(names)} of the pictures ({found.setting})."
        parts.append(Part(f"Turned {way}", f"turned-{way}", text=text, shots=shots.get(way, [])))
    everything = f"{len(found.changes)} numbers before and after"
    parts.append(
        Part("All differences", "all", heads=HEADS, rows=[row(c) for c in found.changes], folded=everything)
    )
    beside = path.with_name(f"{path.stem}-faithfulness.csv")
    page = rendered(
        "card.html", runs, title="Before and after", about=f"{one.model} {two.model}", parts=parts,
        leads=[f"Before: {one.model} ({one.weights}). After: {two.model} ({two.weights}). {one.pictures} pictures of {one.data}.",
               *found.notes],
        beside=f"{path.with_suffix('.csv').name} and {beside.name} beside this file hold the numbers.",
    )  # fmt: skip
    return write_all({path: page, path.with_suffix(".csv"): table_csv(found.records()), beside: _csv(shifts)})


def _masked(before: bool, after: bool) -> str:
    """What the page says of models whose patches were hidden, not removed."""
    if before and after:
        return " Patches of both models cannot be removed: they were hidden from attention instead."
    if not (before or after):
        return ""
    one, other = ("before", "after") if before else ("after", "before")
    hidden = f" Patches of the model {one} cannot be removed: they were hidden from attention."
    return f"{hidden} Those {other} were removed: the two are not measured alike."


def samples(found: Comparison, method: str, show: int) -> tuple[dict[str, Any], str]:
    """Some pictures of the run, spread over its classes, and those that turned, with the maps of both models."""
    names = found.before[0].names_of(
        found.before[0].population(found.setting)
    )  # in folders of classes, as a rule
    some = (
        [names[i * len(names) // show] for i in range(min(show, len(names)))] if len(names) > show else names
    )
    return turned_pictures(replace(found, turned={"samples": some, **found.turned}), method, show)


def _tiles(found: Comparison, shifts: Sequence[Shift]) -> list[tuple[str, str, str]]:
    """(what, numbers, difference)."""
    known = {(c.setting, c.metric): c for c in found.changes}
    tiles = []
    for setting, metric, words in TILES:
        if c := known.get((setting, metric)):
            digits = 1 if c.scale == 100 or metric == "mce" else 3
            sides = f"{c.scale * c.before.mean:.{digits}f} → {c.scale * c.after.mean:.{digits}f}"
            tiles.append((words, sides, f"{c.scale * c.difference:+.3g} {c.verdict}".strip()))
    for s in shifts[:1]:
        words = f"faithfulness of {s.method}, {label(s.metric)}"
        tiles.append((words, f"{s.before:.1f} → {s.after:.1f}", f"{s.difference:+.3g} {s.verdict}".strip()))
    return tiles


def _faithful(s: Shift) -> list[Cell]:
    gap = Cell(
        f"{s.difference:+.3g}", s.difference, LOOK.get(s.verdict, ""), f"{s.low:+.3g} to {s.high:+.3g}"
    )
    sides = [Cell(number(v, s.metric), v) for v in (s.before, s.after)]
    return [
        Cell(s.method, s.method),
        Cell(label(s.metric), s.metric),
        *sides,
        gap,
        Cell(str(s.images), s.images),
    ]


def _csv(shifts: Sequence[Shift]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*Shift.__dataclass_fields__, "verdict"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**s.__dict__, "verdict": s.verdict} for s in shifts)
    return text.getvalue()
