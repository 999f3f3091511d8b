"""Bars and small maps as SVG text, in the look of `svg`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from steadygaze.report.svg import COLOURS, LETTER, WIDTH, ticks

ROW = 19  # pixels from one bar to the next
ROOM = 34  # below the bars, for the axis


@dataclass(frozen=True)
class Bar:
    """A value with its 95 % interval; `rank` decides the colour."""

    name: str
    value: float
    low: float
    high: float
    rank: int = 0
    tooltip: str = ""


def bars(rows: Sequence[Bar], *, x_label: str, title: str, highest: float | None = None) -> str:
    """Horizontal bars from zero, one below the other, with whiskers and the number at the end."""
    known = [bar for bar in rows if math.isfinite(bar.value)]
    left = 12 + LETTER * max((len(bar.name) for bar in rows), default=0)
    right = 48.0
    top = highest or max((max(bar.high, bar.value) for bar in known), default=1.0) or 1.0
    height = ROW * len(rows) + ROOM

    def at(value: float) -> float:
        return left + max(0.0, min(value, top)) / top * (WIDTH - left - right)

    parts = []
    for value in ticks(0, top):
        x = at(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - ROOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - ROOM + 15}" text-anchor="middle">{value:g}</text>'
        )
    middle = f'x="{(left + WIDTH - right) / 2:.1f}" y="{height - 4}" text-anchor="middle"'
    parts.append(f'<text class="axis" {middle}>{escape(x_label)}</text>')
    for i, bar in enumerate(rows):
        y = ROW * i + ROW / 2
        at_name = f'x="{left - 7:.1f}" y="{y + 3.5:.1f}" text-anchor="end"'
        parts.append(f'<text class="tick" {at_name}>{escape(bar.name)}</text>')
        if not math.isfinite(bar.value):
            continue
        colour = f"c{bar.rank}" if bar.rank < COLOURS else "rest"
        box = f'x="{left:.1f}" y="{y - 6:.1f}" width="{at(bar.value) - left:.1f}" height="12" rx="2"'
        tooltip = bar.tooltip or f"{bar.name}: {bar.value:.1f} ({bar.low:.1f} to {bar.high:.1f})"
        tooltip = f"<title>{escape(tooltip)}</title>"
        parts.append(f'<rect class="dot {colour}" opacity=".78" {box}>{tooltip}</rect>')
        parts.append(
            f'<line class="over" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        end = max(at(bar.high), at(bar.value)) + 6
        parts.append(f'<text class="tick" x="{end:.1f}" y="{y + 3.5:.1f}">{bar.value:.1f}</text>')
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"


def grid(values: Sequence[Sequence[float]], *, title: str, names: tuple[str, str]) -> str:
    """A small map of percentages: the darker, the more. names: what goes across and down."""
    side = 44
    rows, columns = len(values), max(len(row) for row in values)
    width, height = side * columns + 30, side * rows + 26
    parts = []
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            if not math.isfinite(value):
                continue
            x, y = 26 + side * c, side * r
            shade = 0.12 + 0.75 * max(0.0, min(value, 100.0)) / 100
            cell = f'x="{x}" y="{y}" width="{side - 3}" height="{side - 3}" rx="3"'
            parts.append(f'<rect class="dot c1" opacity="{shade:.2f}" {cell}/>')
            centre = f'x="{x + side / 2 - 1:.1f}" y="{y + side / 2 + 3:.1f}" text-anchor="middle"'
            parts.append(f'<text class="over" {centre}>{value:.0f}</text>')
    below = f'x="{26 + side * columns / 2:.0f}" y="{height - 8}" text-anchor="middle"'
    parts.append(f'<text class="axis" {below}>{escape(names[0])}</text>')
    middle = side * rows / 2
    turned = f'transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="axis" {turned}>{escape(names[1])}</text>')
    return (
        f'<svg class="chart" style="max-width:{width * 1.3:.0f}px" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
