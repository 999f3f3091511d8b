"""`steadygaze curves`: the training curves of one or more runs, as one SVG file."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from rich.console import Console

from steadygaze.cli.output import print_line
from steadygaze.errors import InputError
from steadygaze.report.charts import HEIGHT, WIDTH, color, lines
from steadygaze.report.pages import write_all
from steadygaze.runs.settings import Line, LineChart
from steadygaze.training.run_files import read_log

SHADES = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
FEW_POINTS = 60  # rows of a log whose points are drawn large enough to be distinguished
LEGEND_LINE = 16  # height of a line of the legend, in pixels
TITLE = 24  # height of a panel's title

Rows = list[dict[str, str]]


def run(folders: list[Path], out: Path | None, columns: list[str]) -> int:
    """Write the file; returns the exit code."""
    logs = {folder.name or str(folder): read_log(folder) for folder in folders}
    if len(logs) < len(folders):  # some have the same name
        logs = {str(folder): read_log(folder) for folder in folders}
    path = out or folders[0] / "curves.svg"
    write_all({path: draw_curves(logs, columns)})
    print_line(Console(), f"wrote {path}")
    return 0


def draw_curves(logs: dict[str, Rows], columns: list[str]) -> str:
    """One panel for each column; without `columns`, for all that hold numbers."""
    filled = [key for rows in logs.values() for row in rows for key, value in row.items() if value]
    known = list(dict.fromkeys(key for key in filled if key not in ("step", "epoch", "seconds")))
    for column in columns:
        if column not in known:
            raise InputError(f"--columns: expected some of {', '.join(known) or 'none yet'}, got {column}")
    panels = [(column, _panel(column, logs)) for column in columns or known]
    if not panels:
        raise InputError("the runs have no rows yet: wait until they have logged a step")
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    legend = LEGEND_LINE * len(logs) + 12
    width, height = across * WIDTH, down * (HEIGHT + TITLE) + legend
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">',
        _style(logs),
        f'<rect {size} fill="white"/>',
    ]
    for number, name in enumerate(logs):
        y = 14 + LEGEND_LINE * number
        parts.append(f'<line class="line {color(number)}" x1="12" x2="40" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="48" y="{y + 4}">{escape(name)}</text>')
    for number, (column, chart) in enumerate(panels):
        panel_row, panel_column = divmod(number, across)
        x, y = panel_column * WIDTH, legend + panel_row * (HEIGHT + TITLE)
        parts.append(f'<text x="{x + 46}" y="{y + 14}" font-weight="bold">{escape(column)}</text>')
        box = f'x="{x}" y="{y + 18}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        parts.append(re.sub(r"^<svg[^>]*>", f"<svg {box}>", chart, count=1))
    return "\n".join([*parts, "</svg>\n"])


def _panel(column: str, logs: dict[str, Rows]) -> str:
    series = []
    for number, (name, rows) in enumerate(logs.items()):
        points = [(float(row["epoch"]), float(row[column])) for row in rows if row.get(column)]
        if points:
            series.append(Line(name, [x for x, _ in points], [y for _, y in points], number))
    return lines(LineChart(column, series, "epoch", ""))


def _style(logs: dict[str, Rows]) -> str:
    radius = 2.4 if all(len(rows) <= FEW_POINTS for rows in logs.values()) else 1
    shades = "".join(
        f".c{i} {{ stroke: {shade}; }} circle.c{i} {{ fill: {shade}; }}" for i, shade in enumerate(SHADES)
    )
    return (
        "<style>text { font: 11px sans-serif; fill: #333; stroke: none; } "
        ".line { fill: none; stroke-width: 1.4; } "
        f".rest {{ stroke: #999; }} line {{ stroke: #ccc; }} circle {{ r: {radius}px; }} {shades}</style>"
    )
