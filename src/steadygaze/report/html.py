"""The report of verify runs: ranking, curves, scatter, start layers, sample images, settings.

Writes report.html, table.csv and table.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from steadygaze import __version__
from steadygaze.errors import BadInput, RowsNotWritten, SteadygazeError
from steadygaze.faithfulness.metric import METRICS
from steadygaze.files import write_atomic
from steadygaze.method_names import join_name, parse_method
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.report import svg
from steadygaze.report.gallery import gallery
from steadygaze.report.page import Figure, how, legend
from steadygaze.runs.messages import plural, small_sample_note
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.table import Cell
from steadygaze.runs.untrusted.json_files import damaged_files
from steadygaze.runs.untrusted.schema import check_complete
from steadygaze.runs.verify.summary import CHANCE, Line, Section, quantity


def write_report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    baseline: str | None = None,
    images: bool = True,
    repeats: int = 2000,
    on_progress: OnProgress = ignore_progress,
) -> list[Path]:
    """Write the report of these runs; returns the files: report.html, table.csv, table.md.

    baseline: the method the others are compared with, as `method` or `method/score`; None: the best one
    """
    with damaged_files(*folders):
        rows = Rows.read(*folders)
        check_complete(rows.runs, rows.folders)
        rows.columns(on_progress)
        if STRESS in rows.kinds:
            from steadygaze.report.stress import write_stress

            return write_stress(rows, out, images=images, repeats=repeats)
        return _write_verify(rows, out, baseline, images, repeats)


def _write_verify(
    rows: Rows, out: str | Path | None, baseline: str | None, images: bool, repeats: int
) -> list[Path]:
    folders = rows.folders
    table = rows.table(repeats=repeats)
    if not table.sections:
        raise BadInput(f"{', '.join(map(str, folders))}: no rows yet. Run steadygaze verify first.")
    parts = [_part(section, rows, baseline, images) for section in table.sections]
    about = table.sections[0].model
    explained = _explained(table.sections)
    page = rendered(
        "ranking.html",
        rows.runs,
        rows,
        title="How faithful are the explanations?",
        about=about,
        parts=parts,
        metrics=explained,
    )
    path = Path(folders[0]) / "report.html" if out is None else Path(out)
    return write_all(
        {path: page, path.with_name("table.csv"): table.csv(), path.with_name("table.md"): table.markdown()}
    )


def write_all(written: dict[Path, str]) -> list[Path]:
    """Write these files; returns their paths."""
    path = next(iter(written))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in written.items():
            write_atomic(file, text)  # a link in the folder is replaced, not followed
    except OSError as error:
        raise RowsNotWritten(f"{error.filename or path} could not be written: {error.strerror}") from error
    return list(written)


def rendered(name: str, runs: Iterable[dict[str, Any]], rows: Rows | None = None, **given: Any) -> str:
    """A page from a template of this folder, with its runs' settings and the rows that could not be used."""
    return (
        _environment()
        .get_template(name)
        .render(
            runs=[how(run) for run in runs],
            unreadable=list(rows.unreadable.values()) if rows else [],
            flagged=", ".join(f"{count} × {flag} of {what}" for (what, flag), count in rows.flagged.items())
            if rows
            else "",
            version=__version__,
            colours=svg.COLOURS,
            **{"beside": "table.csv and table.md in the same folder contain the numbers.", **given},
        )
    )


@cache
def _environment() -> Environment:
    here = FunctionLoader(lambda other: (files("steadygaze") / "report" / other).read_text(encoding="utf-8"))
    environment = Environment(
        loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["value"] = lambda value, metric: quantity(metric).text(value)
    environment.filters["soft"] = _soft
    environment.filters["counted"] = plural
    return environment


def _soft(name: str) -> Markup:
    """A name that may be wrapped between its parts, and is copied as it is."""
    pieces = re.split(r"(?<=[+:,=_/])", name)
    return Markup("<wbr>").join(pieces)


def _part(section: Section, rows: Rows, baseline: str | None, images: bool) -> dict[str, Any]:
    """Everything the template shows of one model on one data set."""
    base = section.line(baseline) if baseline else section.lines[0]
    drawn = [line for line in section.lines if _start_of(line[0]) is None]
    ranks = {line: rank for rank, line in enumerate(drawn)}
    run = rows.runs[section.run]
    return {
        "section": section,
        "count": _count(section),
        "headings": [(q.title, q.better, q.direction_text) for q in map(quantity, section.shown)],
        "has_chance": any(method.partition(":")[0] == CHANCE for method, _ in section.lines),
        "lines": _ranking(section, base, ranks),
        "best": _called(section.lines[0], section),
        "base": _called(base, section),
        "first": quantity(section.shown[0]).title,
        "caution": small_sample_note(len(section.names)),
        "legend": [(rank, _called(line, section)) for line, rank in ranks.items() if rank < svg.COLOURS],
        "rest": max(0, len(drawn) - svg.COLOURS),
        "curves": _curves(section, ranks),
        "figures": [
            figure
            for figure in (_scatter(section, ranks), _start(section), _agreement(section, run))
            if figure
        ],
        "gallery": gallery(rows.folders[section.run] if rows.folders else None, run) if images else None,
    }


def _count(section: Section) -> str:
    """How many methods, and how many rows if methods come with several scores."""
    count, lines = len({method for method, _ in section.lines}), len(section.lines)
    methods = plural(count, "attribution method")
    return f"{methods} ({lines} with their scores)" if lines > count else methods


def _called(line: Line, section: Section) -> str:
    """The method's name, with its score where it comes with several."""
    several = len({score for method, score in section.all_lines if method == line[0]}) > 1
    return f"{line[0]} · {line[1]}" if several else line[0]


def _ranking(section: Section, base: Line, ranks: dict[Line, int]) -> list[dict[str, Any]]:
    known = {key: cell for key, cell in section.cells.items() if not np.isnan(cell.value)}
    spans = {}
    for metric in section.shown:
        column = [cell for (name, _), cell in known.items() if name == metric]
        spans[metric] = min((c.low for c in column), default=0.0), max((c.high for c in column), default=1.0)
    best = {metric: section.best(metric) for metric in section.shown}
    gaps = section.versus(base)
    table_rows = []
    for line in section.lines:
        cells = []
        for metric in section.shown:
            cell = known.get((metric, line))
            bar = svg.bar(cell.value, cell.low, cell.high, spans[metric]) if cell else ""
            cells.append({"metric": metric, "cell": cell, "bar": bar, "best": best[metric] == line})
        gap = gaps.get(line)
        table_rows.append(
            {
                "method": line[0],
                "score": line[1],
                "cells": cells,
                "rank": ranks.get(line, svg.COLOURS),
                "gap": None if gap is None or np.isnan(gap.value) else gap,
                "sure": gap is not None and (gap.low > 0 or gap.high < 0),
                "images": max(
                    (cell.images for (_, which), cell in known.items() if which == line), default=0
                ),
                "flagged": len(section.flags.get(line, ())),
                "base": line == base,
                "chance": line[0].partition(":")[0] == CHANCE,
                "metric": section.shown[0],
            }
        )
    return table_rows


def _curves(section: Section, ranks: dict[Line, int]) -> list[Figure]:
    figures = []
    across = [100 * ratio for ratio in section.ratios]
    for metric in section.metrics:
        drawn = METRICS[metric].curve if metric in METRICS else None
        if drawn is None:
            continue
        series = []
        for line, rank in ranks.items():
            curve = section.curve(metric, line) if (metric, line) in section.table else None
            if curve is not None:
                series.append(svg.Series(_called(line, section), across, curve.tolist(), rank))
        if series and len(across) > 1:
            title = f"{quantity(metric).title}: {drawn.axis}"
            chart = svg.lines(series, x_label="share of the patches, %", y_label=drawn.axis, title=title)
            figures.append(Figure(f"{drawn.title} ({quantity(metric).title})", drawn.better, chart))
    return figures


def _scatter(section: Section, ranks: dict[Line, int]) -> Figure | None:
    for kind in ("accuracy", "aopc"):
        across, up = f"deletion_{kind}", f"insertion_{kind}"
        points = []
        for line, rank in ranks.items():
            x, y = section.cells.get((across, line)), section.cells.get((up, line))
            if x and y and not np.isnan(x.value + y.value):
                limits = [(y.low, y.high)], [(x.low, x.high)]
                points.append(svg.Series(_called(line, section), [x.value], [y.value], rank, *limits))
        if len(points) > 1:
            axes = {"x_label": f"{quantity(across).title}, %", "y_label": f"{quantity(up).title}, %"}
            chart = svg.scatter(points, **axes, title="insertion against deletion")
            return Figure(
                "Insertion against deletion", "best at the top right; whiskers are 95 % intervals", chart
            )
    return None


def _start_of(name: str) -> tuple[str, int] | None:
    """A method's name without the option `start`, and its value; None if it has none or is not installed."""
    try:
        method = parse_method(name)
    except SteadygazeError:
        return None
    options = dict(method.given)
    start = options.pop("start", None)
    return None if start is None else (join_name(method.stem, options), int(start))


def _start(section: Section) -> Figure | None:
    """The score over the layer where PLUS starts, one line for each method."""
    metric = section.shown[0]
    groups: dict[str, list[tuple[int, Cell]]] = {}
    for line in section.lines:
        started, cell = _start_of(line[0]), section.cells.get((metric, line))
        if started is not None and cell is not None:
            name, layer = started
            groups.setdefault(_called((name, line[1]), section), []).append((layer, cell))
    if not groups:
        return None
    series = []
    for rank, (name, points) in enumerate(groups.items()):
        points.sort(key=lambda pair: pair[0])
        layers, cells = [layer for layer, _ in points], [cell for _, cell in points]
        limits = [(cell.low, cell.high) for cell in cells]
        series.append(svg.Series(name, layers, [cell.value for cell in cells], rank, limits))
    axis = f"{quantity(metric).title}, {quantity(metric).unit}".rstrip(", ")
    chart = svg.lines(
        series, x_label="first layer that is added", y_label=axis, title="start layer", whole=True
    )
    return Figure("Where PLUS starts", legend(series), chart)


def _agreement(section: Section, run: dict[str, Any]) -> Figure | None:
    """Pairwise rank correlation of the maps of two methods, mean over the images; the best methods first."""
    columns = [(method, score) for method, score in run["settings"].get("columns", [])]
    lines = [line for line in section.lines if line in columns][: svg.CELLS]
    details = [section.detail("agreement", line) for line in lines]
    whole = [detail for detail in details if detail is not None and detail.shape[1] == len(columns)]
    if len(whole) < 2 or len(whole) < len(lines):
        return None
    indices = [columns.index(line) for line in lines]
    chart = svg.matrix(
        [_called(line, section) for line in lines], [np.nanmean(d, axis=0)[indices].tolist() for d in whole]
    )
    caption = (
        "rank correlation of their maps, mean over the images; best method first, columns ordered as the rows"
    )
    return Figure("Which methods agree", caption, chart)


def _explained(sections: Sequence[Section]) -> list[tuple[str, str, str]]:
    """(metric, range and direction, meaning) of everything that is shown."""
    names = dict.fromkeys(name for section in sections for name in section.shown)
    shown = [q for q in map(quantity, names) if q.summary]
    return [(q.title, q.range_text, f"{q.label}: {q.summary}" if q.label else q.summary) for q in shown]
