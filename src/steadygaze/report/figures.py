"""The figures that suites declare (`runs.figures`), drawn as SVG, and records as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from html import escape
from typing import Any

from steadygaze.report import svg
from steadygaze.report.bars import Bar, bars, grid
from steadygaze.report.page import Figure, legend
from steadygaze.runs import figures


def draw(figure: figures.Figure) -> Figure:
    """A declared figure, for a page."""
    if isinstance(figure, figures.BarChart):
        return _bar_chart(figure)
    if isinstance(figure, figures.LineChart):
        return _line_chart(figure)
    chart = grid(figure.values, title=figure.title, names=(figure.x_label, figure.y_label))
    return Figure(figure.title, escape(figure.caption), chart)


def _bar_chart(figure: figures.BarChart) -> Figure:
    drawn = [Bar(bar.label, bar.value, bar.low, bar.high, bar.group) for bar in figure.bars]
    chart = bars(drawn, x_label=figure.x_label, title=figure.title, highest=figure.highest)
    used = {bar.group for bar in figure.bars}
    keys = [svg.Series(name, [], [], group) for group, name in enumerate(figure.legend) if group in used]
    return Figure(figure.title, f"{escape(figure.caption)}{legend(keys) if keys else ''}", chart)


def _line_chart(figure: figures.LineChart) -> Figure:
    series = [svg.Series(line.name, line.x, line.y, line.group, line.limits) for line in figure.lines]
    chart = svg.lines(
        series, x_label=figure.x_label, y_label=figure.y_label, title=figure.title, whole=figure.integers
    )
    return Figure(figure.title, f"{escape(figure.caption)}{legend(series)}", chart)


def records_csv(records: Iterable[dict[str, Any]]) -> str:
    """Records as comma-separated text, numbers with six digits."""
    listed = list(records)
    if not listed:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(listed[0]), lineterminator="\n")
    writer.writeheader()
    for record in listed:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()})
    return text.getvalue()
