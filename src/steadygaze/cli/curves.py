"""`steadygaze curves`: the training curves of several runs in one picture, an SVG that stands alone."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from rich.console import Console

from steadygaze.cli.running import say
from steadygaze.errors import BadInput
from steadygaze.report.html import write_all
from steadygaze.report.svg import COLOURS, HEIGHT, WIDTH, Series, lines
from steadygaze.training.run_files import read_log

SHADES = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
FEW = 60  # rows of a log whose points are seen one by one
LINE = 16  # pixels a line of the legend takes


def run(folders: list[Path], out: Path | None, columns: list[str]) -> int:
    """Draw them; gives the exit code."""
    logs = {folder.name or str(folder): read_log(folder) for folder in folders}
    if len(logs) < len(folders):
        logs = {str(folder): read_log(folder) for folder in folders}
    path = out or folders[0] / "curves.svg"
    write_all({path: picture(logs, columns)})
    say(Console(), f"wrote {path}")
    return 0


def picture(logs: dict[str, list[dict[str, str]]], columns: list[str]) -> str:
    """One panel for each column that any run has numbers of; without `columns`, for all of them."""
    filled = [key for rows in logs.values() for row in rows for key, value in row.items() if value]
    known = list(dict.fromkeys(key for key in filled if key not in ("step", "epoch", "seconds")))
    for column in columns:
        if column not in known:
            raise BadInput(f"--columns: expected some of {', '.join(known) or 'none yet'}, got {column}")
    panels = [(column, _panel(column, logs)) for column in columns or known]
    if not panels:
        raise BadInput("the runs have no row yet: let them log a step first")
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    legend = LINE * len(logs) + 12
    width, height = across * WIDTH, down * (HEIGHT + 24) + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        _style(logs),
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for number, name in enumerate(logs):
        shade = f"c{number}" if number < COLOURS else "rest"
        parts.append(
            f'<line class="line {shade}" x1="12" x2="40" y1="{14 + LINE * number}" y2="{14 + LINE * number}"/>'
        )
        parts.append(f'<text x="48" y="{18 + LINE * number}">{escape(name)}</text>')
    for number, (column, chart) in enumerate(panels):
        row, place = divmod(number, across)
        top = legend + row * (HEIGHT + 24)
        parts.append(
            f'<text x="{place * WIDTH + 46}" y="{top + 14}" font-weight="bold">{escape(column)}</text>'
        )
        box = f'x="{place * WIDTH}" y="{top + 18}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        parts.append(re.sub(r"^<svg[^>]*>", f"<svg {box}>", chart, count=1))
    return "\n".join([*parts, "</svg>\n"])


def _panel(column: str, logs: dict[str, list[dict[str, str]]]) -> str:
    series = []
    for number, (name, rows) in enumerate(logs.items()):
        points = [(float(row["epoch"]), float(row[column])) for row in rows if row.get(column)]
        if points:
            series.append(Series(name, [x for x, _ in points], [y for _, y in points], number))
    return lines(series, x_label="epoch", y_label="", title=column)


def _style(logs: dict[str, list[dict[str, str]]]) -> str:
    dots = 2.4 if all(len(rows) <= FEW for rows in logs.values()) else 1
    shades = "".join(
        f".c{i} {{ stroke: {shade}; }} circle.c{i} {{ fill: {shade}; }}" for i, shade in enumerate(SHADES)
    )
    return (
        "<style>text { font: 11px sans-serif; fill: #333; stroke: none; } .line { fill: none; stroke-width: 1.4; } "
        f".rest {{ stroke: #999; }} line {{ stroke: #ccc; }} circle {{ r: {dots}px; }} {shades}</style>"
    )
