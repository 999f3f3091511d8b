"""What a terminal and a notebook show of rows: a line of text, and the table of their results."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from steadygaze.notebook import table
from steadygaze.quantity import plural
from steadygaze.runs.statistics import small_sample_note

if TYPE_CHECKING:
    from steadygaze.runs.card import Card
    from steadygaze.runs.ranking import Section
    from steadygaze.runs.rows import Rows

MOST_ROWS = 500_000  # a longer run is not summarized by a mere display
MOST_LINES = 24  # of a table


def rows_text(rows: Rows) -> str:
    """One line, such as `Rows(480 rows of verify: embedded; 20 images, 6 methods, 4 metrics)`."""
    columns = rows.columns()
    counts = {name: len(np.unique(columns.codes[name])) for name in ("image", "metric")}
    what = "method" if "stress" not in rows.kinds else "setting"
    counts[what] = len(np.unique(columns.codes[what]))
    parts = [plural(counts[name], name) for name in ("image", what, "metric")]
    models = ", ".join(dict.fromkeys(str(run["settings"].get("model", "")) for run in rows.runs))
    runs = f"{plural(len(rows.runs), 'run')} of " if len(rows.runs) != 1 else ""
    kinds = " and ".join(sorted(rows.kinds))
    return f"Rows({plural(len(rows), 'row')} of {runs}{kinds}: {models}; {', '.join(parts)})"


def rows_html(rows: Rows) -> str:
    """The ranking of a run of verify, or the numbers of a run of stress."""
    head = f"<div>{escape(rows_text(rows))}</div>"
    if not len(rows) or len(rows.kinds) > 1:
        return head
    if len(rows) > MOST_ROWS:
        return f"{head}<div>rows.table() or rows.cards() computes the summary.</div>"
    if "stress" in rows.kinds:
        return head + "".join(_card_html(card) for card in rows.cards())
    return head + "".join(_section_html(section) for section in rows.table().sections)


def _section_html(section: Section) -> str:
    from steadygaze.runs.ranking import SHARE, share_text

    with_share = section.ceiling is not None and section.chance is not None
    shown = [section.quantity(metric) for metric in section.shown]
    lines = []
    for method, score in section.first_lines(MOST_LINES):
        cells = [section.cells.get((one.name, (method, score))) for one in shown]
        texts = [
            ""
            if cell is None or np.isnan(cell.value)
            else f"{one.text(cell.value)} [{one.text(cell.low)}, {one.text(cell.high)}]"
            for cell, one in zip(cells, shown, strict=True)
        ]
        texts += [share_text(section.share(section.shown[0], (method, score)))] if with_share else []
        lines.append([method, score, *texts])
    heads = ["method", "score", *(f"{one.title}{one.arrow}" for one in shown)]
    heads += [SHARE] if with_share else []
    images = plural(len(section.table), "image")
    made = table(
        heads,
        lines,
        caption=f"{section.title}, {images}; 95 % intervals",
        numbers=range(2, len(heads)),
    )
    return made + _notes(len(section.lines), len(section.table))


def _card_html(card: Card) -> str:
    lines = [
        [label, f"{number.quantity.title}{number.quantity.arrow}", text]
        for (label, metric), number in card.numbers.items()
        if (text := card.text(label, metric))
    ]
    caption = f"{card.model} on {card.data}, {plural(card.image_count, 'image')}; 95 % intervals"
    made = table(["setting", "metric", "value"], lines[:MOST_LINES], caption=caption, numbers=[2])
    return made + _notes(len(lines), card.image_count)


def _notes(lines: int, images: int) -> str:
    rest = lines - MOST_LINES
    more = f"<div>and {rest} more lines</div>" if rest > 0 else ""
    note = small_sample_note(images)
    return more + (f"<div>{escape(note)}</div>" if note else "")
