"""The files of a sweep: table.md, table.csv and sweep.svg, a panel of dots with whiskers for each number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from steadygaze.report.figures import records_csv
from steadygaze.report.html import write_all
from steadygaze.report.svg import LETTER, ticks
from steadygaze.runs.messages import markdown_text, plural
from steadygaze.runs.studies.summary import SweepNumber, SweepTable

WIDTH, ROW, TITLE, AXIS = 520, 20, 26, 30  # pixels: of a panel, from one dot to the next, above, below
INTERVALS = (
    "Mean over seeds with its 95 % interval, a bootstrap over seeds and images; one seed: over images alone."
)


def write_sweep(table: SweepTable, out: Path, command: str = "") -> list[Path]:
    """Write the files into the output folder of the sweep."""
    return write_all(
        {
            out / "table.md": markdown(table, command),
            out / "table.csv": records_csv(number.record() for number in table.numbers),
            out / "sweep.svg": figure(table),
        }
    )


def markdown(table: SweepTable, command: str = "") -> str:
    """One row for each cell, one column for each number."""
    titles = table.titles
    cells = table.of(titles[0])
    head = ["", "seeds", *map(markdown_text, titles)]
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for row, cell in enumerate(cells):
        numbers = [table.of(title)[row] for title in titles]
        values = [markdown_text(cell.cell), str(cell.seeds), *map(number_text, numbers)]
        lines.append(f"| {' | '.join(values)} |")
    images = plural(cells[0].images, "image")
    notes = [f"{INTERVALS} {images}. table.csv has the differences to the first row."]
    if table.missing:
        notes.append(f"Not finished: {'; '.join(table.missing)}.")
    if command:
        notes.append(f"`{command}`")
    return "\n".join([*lines, "", "\n\n".join(notes), ""])


def number_text(number: SweepNumber) -> str:
    """A value with its interval.

    72.1 [71.0, 73.4]
    """
    text = number.quantity.text
    return f"{text(number.value)} [{text(number.low)}, {text(number.high)}]"


def figure(table: SweepTable) -> str:
    """All numbers, one panel below the other."""
    parts, top = [], 0.0
    for title in table.titles:
        numbers = table.of(title)
        parts.append(f'<g transform="translate(0 {top:.0f})">{panel(title, numbers)}</g>')
        top += TITLE + ROW * len(numbers) + AXIS
    size = f'width="{WIDTH}" height="{top:.0f}"'
    style = (
        "<style>text { font: 11px sans-serif; fill: #333; } .title { font-weight: bold; } "
        ".grid { stroke: #ddd; } .whisker { stroke: #2563eb; stroke-width: 1.6; } circle { fill: #2563eb; }"
        "</style>"
    )
    box = f'viewBox="0 0 {WIDTH} {top:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>'
    return "\n".join([head, style, f'<rect {size} fill="white"/>', *parts, "</svg>\n"])


def panel(title: str, numbers: Sequence[SweepNumber]) -> str:
    """A dot with a whisker for each cell, one below the other."""
    scale = numbers[0].quantity.scale
    shown = [(scale * n.value, scale * n.low, scale * n.high) for n in numbers]
    known = [value for limits in shown for value in limits if math.isfinite(value)] or [0.0, 1.0]
    room = (max(known) - min(known)) * 0.05 or 1.0
    low, high = min(known) - room, max(known) + room
    left = 12 + LETTER * max(len(number.cell) for number in numbers)
    bottom = TITLE + ROW * len(numbers)

    def at(value: float) -> str:
        return f"{left + (value - low) / (high - low) * (WIDTH - left - 14):.1f}"

    parts = [f'<text class="title" x="8" y="16">{escape(title)}</text>']
    for value in ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{at(value)}" x2="{at(value)}" y1="{TITLE}" y2="{bottom}"/>'
            f'<text x="{at(value)}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
        )
    for row, (number, (value, least, most)) in enumerate(zip(numbers, shown, strict=True)):
        y = TITLE + ROW * row + ROW / 2
        parts.append(f'<text x="{left - 7:.1f}" y="{y + 4}" text-anchor="end">{escape(number.cell)}</text>')
        if not math.isfinite(value):
            continue
        tooltip = f"<title>{escape(f'{number.cell}: {number_text(number)}')}</title>"
        parts.append(
            f'<line class="whisker" x1="{at(least)}" x2="{at(most)}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{at(value)}" cy="{y}" r="3.5">{tooltip}</circle>'
        )
    return "".join(parts)
