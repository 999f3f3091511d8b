"""The page of `steadygaze card`: accuracy, robustness, attention, faithfulness, maps side by side, classes
gained and lost."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from steadygaze.report.changes import HEADS, STYLES, change_figures, row, sentence, short_list
from steadygaze.report.compare import classes_part, folders_of, lead, turned_parts
from steadygaze.report.figures import records_csv
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Cell, Part
from steadygaze.report.samples import shots_of
from steadygaze.runs.card import FaithfulnessChange
from steadygaze.runs.compare import Comparison
from steadygaze.runs.untrusted.json_files import damaged_files
from steadygaze.runs.verify.summary import CHANCE

TILES = (
    ("clean", "top1"),
    ("corruptions", "mean_error"),
    ("corruptions", "mce"),
    ("corruptions", "attention_stability"),
    ("clean", "attention_entropy"),
)
ATTENTION_TEXT = (
    "Entropy: how spread out attention is. Stability: how similar attention under corruption is to that on "
    "the clean image. Overfocus, Gini and peak: how much attention the most attended tokens receive. "
    "Distance: how far away tokens attend, in patches. Diversity: how similar heads are (lower: more "
    "diverse)."
)
FAITHFULNESS_TEXT = (
    "How faithful the maps of each model are, measured by removing patches in the order of the map. ↑: "
    "higher is better; ↓: lower is better. random is the chance level. A difference may come from the model "
    "rather than the maps: a model that is more confident, or depends on fewer patches, loses more when they "
    "are removed."
)
ROBUSTNESS_NOTE = (
    "After minus before. ↑: higher is better; ↓: lower is better. Coloured: the paired 95 % interval "
    "excludes zero. p: McNemar's exact test of correct and wrong predictions; – where a row has none."
)


def write_card(
    comparison: Comparison,
    faithfulness: Sequence[FaithfulnessChange],
    path: Path,
    runs: Sequence[dict[str, Any]],
    *,
    show: int = 6,
    images: bool = True,
    masked: Sequence[bool] = (False, False),
) -> list[Path]:
    """Write the page and, beside it, both tables as .csv; returns the files. masked: whether patches were
    hidden from attention rather than removed; before, and after."""
    with damaged_files(*folders_of(comparison)):
        return _write(comparison, faithfulness, path, runs, show if images else 0, show, masked)


def _write(
    comparison: Comparison,
    faithfulness: Sequence[FaithfulnessChange],
    path: Path,
    runs: Sequence[dict[str, Any]],
    shown: int,
    listed: int,
    masked: Sequence[bool],
) -> list[Path]:
    """shown: images with maps; listed: names of changed images."""
    first = short_list(comparison.changes)
    attention = [row(c) for c in first if _is_attention(c.quantity.name)]
    rest = [row(c) for c in first if not _is_attention(c.quantity.name)]
    parts = [
        Part(
            "At a glance",
            "glance",
            tiles=_tiles(comparison, faithfulness),
            text=f"Before → after, on {comparison.images_text}. ↑: higher is better; ↓: lower is better.",
        ),
        Part(
            "Accuracy and robustness",
            "robustness",
            heads=HEADS,
            figures=change_figures(comparison),
            rows=rest,
            after=ROBUSTNESS_NOTE,
        ),
        Part(
            "Attention",
            "attention",
            heads=HEADS,
            rows=attention,
            text=ATTENTION_TEXT,
            empty="" if attention else "Not measured: the runs do not include the suite attention.",
        ),
        Part(
            "Faithfulness",
            "faithfulness",
            heads=["method", "metric", "before", "after", "difference", "images"],
            rows=[_faithfulness_row(change) for change in faithfulness],
            text=FAITHFULNESS_TEXT + _masking_text(*masked),
        ),
    ]
    if shown:
        shots, text = shots_of(comparison, {"samples": _spread(comparison, shown)}, shown)
        parts.append(Part("Maps side by side", "maps", shots=shots.get("samples", []), text=text))
    parts.append(classes_part(comparison))
    parts += turned_parts(comparison, shown, listed)
    folded = f"{len(comparison.changes)} numbers before and after"
    everything = [row(c) for c in comparison.changes]
    parts.append(Part("All differences", "all", heads=HEADS, rows=everything, folded=folded))
    one, two = comparison.before[0], comparison.after[0]
    beside = path.with_name(f"{path.stem}-faithfulness.csv")
    page = rendered(
        "card.html",
        runs,
        title="Before and after",
        about=f"{one.model} {two.model}",
        parts=parts,
        leads=[sentence(comparison), lead(comparison), *comparison.notes],
        beside=f"{path.with_suffix('.csv').name} and {beside.name} in the same folder contain the numbers.",
    )
    return write_all(
        {
            path: page,
            path.with_suffix(".csv"): records_csv(comparison.records()),
            beside: _csv(faithfulness),
        }
    )


def _is_attention(metric: str) -> bool:
    from steadygaze.runs.stress.suites.attention import Attention

    return metric in {known.name for known in Attention.quantities}


def _masking_text(before: bool, after: bool) -> str:
    """About models whose patches were hidden, not removed."""
    if before and after:
        return " Patches of both models cannot be removed: they were hidden from attention instead."
    if not (before or after):
        return ""
    one, other = ("before", "after") if before else ("after", "before")
    hidden = f" Patches of the model {one} cannot be removed: they were hidden from attention."
    return (
        f"{hidden} Those of the model {other} were removed: the two are not measured with the same settings."
    )


def _spread(comparison: Comparison, show: int) -> list[str]:
    """Images of the run, spread over its classes: in folders of classes, names are sorted by class."""
    card = comparison.before[0]
    names = card.names_of(card.population(comparison.setting))
    if len(names) <= show:
        return names
    chosen = [names[i * len(names) // show] for i in range(show)]
    return [
        *chosen,
        *(name for name in names if name not in chosen),
    ]  # the runs may not have stored all of them


def _tiles(comparison: Comparison, faithfulness: Sequence[FaithfulnessChange]) -> list[tuple[str, str, str]]:
    """(title, numbers, difference)."""
    changes = {change.key: change for change in comparison.changes}
    tiles = []
    for label, metric in TILES:
        if change := changes.get((label, metric)):
            title = f"{label}: {change.quantity.title}{change.quantity.arrow}"
            text = change.quantity.text
            sides = f"{text(change.before.mean)} → {text(change.after.mean)}"
            tiles.append((title, sides, _difference(change.scale * change.difference, change.verdict)))
    for one in [change for change in faithfulness if change.method.partition("/")[0] != CHANCE][:1]:
        title = f"{one.method}: {one.quantity.title}{one.quantity.arrow}"
        sides = f"{one.before:.1f} → {one.after:.1f}"
        tiles.append((title, sides, _difference(one.difference, one.verdict)))
    return tiles


def _difference(value: float, verdict: str) -> str:
    return f"{value:+.3g}, {verdict or 'no significant change'}"


def _faithfulness_row(change: FaithfulnessChange) -> list[Cell]:
    span = f"{change.low:+.3g} to {change.high:+.3g}"
    style = STYLES.get(change.verdict, "")
    return [
        Cell(change.method, change.method),
        Cell(f"{change.quantity.title}{change.quantity.arrow}", change.metric),
        *(Cell(change.quantity.text(value), value) for value in (change.before, change.after)),
        Cell(f"{change.difference:+.3g}", change.difference, style, span),
        Cell(str(change.images), change.images),
    ]


def _csv(changes: Sequence[FaithfulnessChange]) -> str:
    names = [one.name for one in fields(FaithfulnessChange)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "verdict"])
    writer.writerows([*(getattr(change, name) for name in names), change.verdict] for change in changes)
    return text.getvalue()
