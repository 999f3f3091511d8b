"""Reports of runs, each one HTML file that works offline.

Here are the parts of a page, the reports of `verify` and of `stress`, and the files of a sweep. Images are
those that the runs stored; nothing is computed here.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from steadygaze import __version__
from steadygaze.data.datasets.tree import abbreviated
from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.files import make_parent, write_atomic
from steadygaze.methods.registry import join_name, split_options
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.quantity import plural
from steadygaze.report import charts as svg
from steadygaze.report.charts import LETTER, ticks
from steadygaze.report.figures import write_figures
from steadygaze.runs.card import Card
from steadygaze.runs.metrics import known_metric
from steadygaze.runs.ranking import Line, Section, share_text
from steadygaze.runs.request import CHANCE
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.samples import (
    data_address,
    read_map_samples,
    read_setting_samples,
)
from steadygaze.runs.settings import FADED, BarChart, LineChart
from steadygaze.runs.settings import Figure as Chart
from steadygaze.runs.settings import Line as ChartLine
from steadygaze.runs.statistics import INTERVALS, Cell, csv_text, markdown_text, small_sample_note, told_apart
from steadygaze.untrusted import check_complete, damaged_files

if TYPE_CHECKING:
    from steadygaze.runs.sweep import SweepNumber, SweepTable


@dataclass(frozen=True)
class Figure:
    """A chart with its heading and a remark. note, chart: HTML, in which names from files are escaped."""

    title: str
    note: str
    chart: str


@dataclass(frozen=True)
class TableCell:
    """A cell of a table: text, sort key, CSS class, and small print."""

    text: str
    sort: Any = ""
    look: str = ""
    small: str = ""


@dataclass(frozen=True)
class Part:
    """One section of a page."""

    title: str
    id: str = ""
    nav: str = ""
    text: str = ""
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    sheets: list[tuple[str, str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    texts: int = 2
    rows: list[list[TableCell]] = field(default_factory=list)
    folded: str = ""
    shots: list[Any] = field(default_factory=list)
    after: str = ""
    empty: str = ""


def legend(names: Iterable[tuple[int, str]]) -> str:
    """Return the legend of a chart, from the groups and their names."""
    keys = [
        f'<span><span class="key {svg.color(group)}"></span>{escape(name)}</span>'
        for group, name in names
        if group < FADED
    ]
    return f'<span class="legend">{"".join(keys)}</span>'


def draw(chart: Chart) -> Figure:
    """Draw a chart that a suite declares, with its caption and legend."""
    keys: list[tuple[int, str]] = []
    if isinstance(chart, BarChart):
        used = {bar.group for bar in chart.bars}
        keys = [(group, name) for group, name in enumerate(chart.legend) if group in used]
    elif isinstance(chart, LineChart):
        keys = [(line.group, line.name) for line in chart.lines]
    return Figure(chart.title, f"{escape(chart.caption)}{legend(keys) if keys else ''}", svg.draw(chart))


def how(run: dict[str, Any]) -> list[tuple[str, str]]:
    """List the settings of a run of either kind; those that it does not have are left out."""
    settings, about = run["settings"], run.get("about", {})
    count = f", {settings['images']} images ({settings.get('layout', '')})" if settings.get("images") else ""
    chosen = "the first ones" if settings.get("stream") else "spread evenly over the classes"
    limit = f", at most {settings['limit']}, {chosen}" if settings.get("limit") else ""
    shifts = "; ".join(f"{s['name']}: {s['images']} images, {s['hash']}" for s in settings.get("shifts", ()))
    near = "; ".join(
        f"{s['name']}: {s['images']} images, bank of {s['bank']}, {s['hash']}"
        for s in settings.get("neighbors", ())
    )
    epsilons = ", ".join(f"{255 * e:g}/255" for e in settings.get("epsilons", ()))
    shown = [
        ("command", about.get("command", "")),
        ("model", ", ".join(filter(None, (settings["model"], settings.get("checkpoint"))))),
        ("weights", settings["weights"]),
        ("data", f"{settings.get('data', '')}{count}{limit}"),
        ("hash of the images", settings.get("images_hash") or ""),
        ("preprocessing", ", ".join(f"{k} {v}" for k, v in settings.get("preprocessing", {}).items())),
        ("explained class", settings.get("target", "")),
        ("metrics", ", ".join(settings.get("metrics", ()))),
        ("ratios", ", ".join(f"{ratio:g}" for ratio in settings.get("ratios", ()))),
        ("fill", settings.get("fill", "")),
        ("suite", ", ".join(settings.get("suite", ()))),
        ("shifts", shifts),
        ("neighbors", near),
        ("corruptions", ", ".join(settings.get("corruptions", ()))),
        ("severities", ", ".join(map(str, settings.get("severities", ())))),
        ("epsilons", f"{epsilons}; {settings['pgd_steps']} steps of PGD" if epsilons else ""),
        ("salient first", settings.get("salient") or ""),
        ("notes", "; ".join(settings.get("notes", ()))),
        ("seed", str(settings["seed"])),
        ("batch", str(settings.get("batch", ""))),
        ("device", settings.get("device", "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in settings["versions"].items())),
        ("began", about.get("began", "")),
    ]
    return [(name, text) for name, text in shown if text]


def records_csv(records: Iterable[dict[str, Any]]) -> str:
    """Write records as comma-separated text, numbers with six digits."""
    listed = list(records)
    if not listed:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(listed[0]), lineterminator="\n")
    writer.writeheader()
    for record in listed:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else csv_text(v) for k, v in record.items()})
    return text.getvalue()


Titled = list[tuple[str, str]]  # words and data address
NOT_STORED = "Images are left out: the run stored none (it was made in memory, or is unfinished)."


def condition_images(run: Path) -> tuple[Titled, Titled, str]:
    """Read one image under the conditions of a run, sheets of several images, and a caption."""
    samples = read_setting_samples(run)
    if samples is None:
        return [], [], NOT_STORED
    small, sheets = (
        [(image.title, data_address(run, image.file)) for image in samples.conditions if image.wide == wide]
        for wide in (False, True)
    )
    text = f"{samples.image} as the model sees it, and under conditions of the run{samples.note}."
    return small, sheets, text if small or sheets else ""


def _gallery(folder: Path | None, run: dict[str, Any]) -> dict[str, Any]:
    """Collect the best and worst images of the leading method, or the reason why there are none."""
    samples = None if folder is None else read_map_samples(folder)
    if samples is None or folder is None:
        command = run.get("about", {}).get("command", "")
        return {
            "why_not": f"{NOT_STORED} Repeat the command to store them: {command}" if command else NOT_STORED
        }
    groups = {
        name: [
            {
                "name": sample.name,
                "title": sample.title,
                "numbers": sample.values,
                "addresses": [data_address(folder, file) for file in sample.files],
            }
            for sample in group
        ]
        for name, group in (("best", samples.best), ("worst", samples.worst))
    }
    return {"methods": samples.methods, "metric": samples.metric, **groups}


def write_report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    baseline: str | None = None,
    images: bool = True,
    repeats: int = 2000,
    figures: str | Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> list[Path]:
    """Write the report of runs, as one HTML file that works offline, with table.csv and table.md beside it.

    Args:
        folders (Sequence[str | Path]): run folders of `verify`, or of `stress`; shards of a run together.
        out (str | Path): HTML file; by default report.html in the first folder.
        baseline (str): method that the others are compared with, as `method` or `method/score`; by default
            the best one.
        images (bool): whether example images are included.
        repeats (int): number of bootstrap samples.
        figures (str | Path): folder for the charts of the page as SVG and PDF files.
        on_progress (Callable): called while rows are read.

    Returns:
        list[Path]: the files.
    """
    with damaged_files(*folders):
        rows = Rows.read(*folders)
        check_complete(rows.runs, rows.folders)
        rows.columns(on_progress)
        folder = None if figures is None else Path(figures)
        if STRESS in rows.kinds:
            return write_stress(rows, out, images=images, repeats=repeats, figures=folder)
        return _write_verify(rows, out, baseline, images, repeats, folder)


def _write_verify(
    rows: Rows,
    out: str | Path | None,
    baseline: str | None,
    images: bool,
    repeats: int,
    figures: Path | None = None,
) -> list[Path]:
    folders = rows.folders
    table = rows.table(repeats=repeats)
    if not table.sections:
        raise InputError(f"{', '.join(map(str, folders))}: no rows yet. Run steadygaze verify first.")
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
    written = write_all(
        {path: page, path.with_name("table.csv"): table.csv(), path.with_name("table.md"): table.markdown()}
    )
    return written + _figure_files(
        [f for part in parts for f in (*part["curves"], *part["figures"])], figures
    )


def _figure_files(figures: Sequence[Figure], folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    return write_figures([(figure.title, figure.note, figure.chart) for figure in figures], folder)


def write_all(written: dict[Path, str]) -> list[Path]:
    """Write these files; returns their paths."""
    path = next(iter(written))
    try:
        make_parent(path, option="out")
        for file, text in written.items():
            write_atomic(file, text)  # a link in the folder is replaced, not followed
    except OSError as error:
        raise RowsNotWrittenError(
            f"{error.filename or path} could not be written: {error.strerror}"
        ) from error
    return list(written)


def rendered(name: str, runs: Iterable[dict[str, Any]], rows: Rows | None = None, **context: Any) -> str:
    """Render a template of this folder, with the settings of runs and the rows that could not be used."""
    return (
        environment()
        .get_template(name)
        .render(
            runs=[how(run) for run in runs],
            unreadable=list(rows.unreadable.values()) if rows else [],
            flagged=", ".join(f"{count} × {flag} of {what}" for (what, flag), count in rows.flagged.items())
            if rows
            else "",
            version=__version__,
            colors=FADED,
            **{"beside": "table.csv and table.md in the same folder contain the numbers.", **context},
        )
    )


@cache
def environment() -> Environment:
    here = FunctionLoader(lambda other: (files("steadygaze") / "report" / other).read_text(encoding="utf-8"))
    environment = Environment(
        loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["soft"] = _soft
    environment.filters["counted"] = plural
    return environment


def _soft(name: str) -> Markup:
    """Let a name be wrapped between its parts, and copied unchanged."""
    pieces = re.split(r"(?<=[+:,=_/])", name)
    return Markup("<wbr>").join(pieces)


def _part(section: Section, rows: Rows, baseline: str | None, images: bool) -> dict[str, Any]:
    """Collect what the template shows about one model on one data set."""
    base = section.line(baseline) if baseline else section.ranked[0]
    drawn = [line for line in section.lines if _start_of(line[0]) is None]
    ranks = {line: rank for rank, line in enumerate(drawn)}
    run = rows.runs[section.run]
    return {
        "section": section,
        "count": _count(section),
        "headings": [(q.words, q.better, q.direction_text) for q in map(section.quantity, section.shown)],
        "has_chance": any(method.partition(":")[0] == CHANCE for method, _ in section.lines),
        "lines": _ranking(section, base, ranks),
        "best": _called(section.ranked[0], section),
        "top": section.cells.get((section.shown[0], section.ranked[0])),
        "metric": section.shown[0],
        "has_share": section.ceiling is not None and section.chance is not None,
        "base": _called(base, section),
        "first": section.quantity(section.shown[0]).words,
        "caution": f"{small_sample_note(len(section.names))} {section.omission}".strip(),
        "legend": [(rank, _called(line, section)) for line, rank in ranks.items() if rank < FADED],
        "rest": max(0, len(drawn) - FADED),
        "curves": _curves(section, ranks),
        "figures": [
            figure
            for figure in (_scatter(section, ranks), _start(section), _agreement(section, run))
            if figure
        ],
        "gallery": _gallery(rows.folders[section.run] if rows.folders else None, run) if images else None,
    }


def _count(section: Section) -> str:
    """Count the methods, and the rows if methods come with several scores."""
    count, lines = len({method for method, _ in section.ranked}), len(section.ranked)
    methods = plural(count, "attribution method")
    return f"{methods} ({lines} with their scores)" if lines > count else methods


def _called(line: Line, section: Section) -> str:
    """Name a method, with its score where it comes with several."""
    several = len({score for method, score in section.all_lines if method == line[0]}) > 1
    return f"{line[0]} · {line[1]}" if several else line[0]


def _ranking(section: Section, base: Line, ranks: dict[Line, int]) -> list[dict[str, Any]]:
    cells_with_value = {key: cell for key, cell in section.cells.items() if not np.isnan(cell.value)}
    images: dict[Line, int] = {}
    for (_, line), known in cells_with_value.items():
        images[line] = max(known.images, images.get(line, 0))
    spans = {}
    for metric in section.shown:
        column = [cell for (name, _), cell in cells_with_value.items() if name == metric]
        spans[metric] = min((c.low for c in column), default=0.0), max((c.high for c in column), default=1.0)
    best = {metric: section.best(metric) for metric in section.shown}
    gaps = section.versus(base)
    table_rows = []
    for line in section.lines:
        cells = []
        for metric in section.shown:
            cell = cells_with_value.get((metric, line))
            bar = svg.bar(cell.value, cell.low, cell.high, spans[metric]) if cell else ""
            cells.append({"metric": metric, "cell": cell, "bar": bar, "best": best[metric] == line})
        gap = gaps.get(line)
        table_rows.append(
            {
                "method": line[0],
                "score": line[1],
                "cells": cells,
                "rank": ranks.get(line, FADED),
                "gap": None if gap is None or np.isnan(gap.value) else gap,
                "sure": gap is not None and (gap.low > 0 or gap.high < 0),
                "images": images.get(line, 0),
                "flagged": len(section.flags.get(line, ())),
                "base": line == base,
                "chance": line[0].partition(":")[0] == CHANCE,
                "ceiling": line == section.ceiling,
                "share": section.share(section.shown[0], line),
                "share_text": share_text(section.share(section.shown[0], line)),
                "metric": section.shown[0],
            }
        )
    return table_rows


def _curves(section: Section, ranks: dict[Line, int]) -> list[Figure]:
    figures = []
    across = [100 * ratio for ratio in section.ratios]
    for metric in section.metrics:
        known = known_metric(metric)
        drawn = None if known is None else known.curve
        if drawn is None:
            continue
        series = []
        for line, rank in ranks.items():
            curve = section.curve(metric, line) if section.has(metric, line) else None
            if curve is not None:
                series.append(ChartLine(_called(line, section), across, curve.tolist(), rank))
        if series and len(across) > 1:
            title = f"{section.quantity(metric).words}: {drawn.axis}"
            chart = svg.lines(LineChart(title, series, "share of the patches, %", drawn.axis))
            figures.append(Figure(f"{drawn.title} ({section.quantity(metric).words})", drawn.better, chart))
    return figures


def _scatter(section: Section, ranks: dict[Line, int]) -> Figure | None:
    for kind in ("accuracy", "aopc"):
        across, up = f"deletion_{kind}", f"insertion_{kind}"
        points = []
        for line, rank in ranks.items():
            x, y = section.cells.get((across, line)), section.cells.get((up, line))
            if x and y and not np.isnan(x.value + y.value):
                limits = [(y.low, y.high)], [(x.low, x.high)]
                points.append(ChartLine(_called(line, section), [x.value], [y.value], rank, *limits))
        if len(points) > 1:
            axes = f"{section.quantity(across).words}, %", f"{section.quantity(up).words}, %"
            chart = svg.scatter(LineChart("insertion against deletion", points, *axes))
            return Figure(
                "Insertion against deletion", "best at the top right; whiskers are 95 % intervals", chart
            )
    return None


def _start_of(name: str) -> tuple[str, int] | None:
    """Split a name into the method without the option `start`, and its value; None if it has none."""
    try:
        stem, options = split_options(name)
    except InputError:  # of a folder of a stranger
        return None
    start = options.pop("start", None)
    return (join_name(stem, options), start) if isinstance(start, int) else None


def _start(section: Section) -> Figure | None:
    """Draw the score over the layer where PLUS starts, one line for each method."""
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
        series.append(ChartLine(name, layers, [cell.value for cell in cells], rank, limits))
    axis = f"{section.quantity(metric).words}, {section.quantity(metric).unit}".rstrip(", ")
    chart = svg.lines(LineChart("start layer", series, "first layer that is added", axis, integers=True))
    return Figure("Where PLUS starts", legend((line.group, line.name) for line in series), chart)


def _agreement(section: Section, run: dict[str, Any]) -> Figure | None:
    """Draw the rank correlation of the maps of each two methods, mean over images; best methods first."""
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
    """Explain the metrics that are shown: (name, range and direction, meaning)."""
    known = {name: section.quantity(name) for section in sections for name in section.shown}
    shown = [q for q in known.values() if q.summary]
    return [(q.words, f"{q.name}: {q.range_text}", q.summary) for q in shown]


def write_stress(
    rows: Rows,
    out: str | Path | None = None,
    *,
    images: bool = True,
    repeats: int = 2000,
    figures: Path | None = None,
) -> list[Path]:
    """Write the report of these stress runs; returns the files: report.html, table.csv, table.md."""
    if rows.kinds != {STRESS}:
        raise InputError(
            "expected runs of one kind, got runs of verify and of stress: write a report for each"
        )
    cards = rows.cards(repeats=repeats)
    if not all(card.keys for card in cards):
        raise InputError(f"{', '.join(map(str, rows.folders))}: no rows yet. Run steadygaze stress first.")
    several = len(cards) > 1
    names = told_apart(rows.runs, rows.folders or [None] * len(cards))
    parts = [
        part
        for i, card in enumerate(cards)
        for part in _parts(card, names[i], i if several else None, images)
    ]
    cautions = [small_sample_note(card.image_count) if card.image_count else "" for card in cards]
    leads = [
        text
        for card, name, caution in zip(cards, names, cautions, strict=True)
        for text in (_lead(card, name), caution, _unfinished(card))
        if text
    ]
    page = rendered(
        "card.html",
        rows.runs,
        rows,
        title="Robustness",
        about=cards[0].model,
        leads=leads,
        parts=parts,
    )
    path = rows.folders[0] / "report.html" if out is None else Path(out)
    records = [record for card in cards for record in card.records()]
    markdown = "\n".join(_markdown(card) for card in cards)
    written = write_all(
        {path: page, path.with_name("table.csv"): records_csv(records), path.with_name("table.md"): markdown}
    )
    return written + _figure_files([figure for part in parts for figure in part.figures], figures)


def _lead(card: Card, name: str) -> str:
    images = f", on {plural(card.image_count, 'image')} of {card.data}" if card.image_count else ""
    return f"{name} under {plural(card.setting_count, 'setting')}{images}."


def _unfinished(card: Card) -> str:
    settings = card.unfinished()
    if not settings:
        return ""
    return (
        f"Not finished: {len(settings)} of {card.setting_count} settings lack images "
        f"({abbreviated(settings)}). Their numbers may be of other images than the rest; "
        "repeat the steadygaze stress command to resume."
    )


def _parts(card: Card, name: str, index: int | None, images: bool) -> list[Part]:
    tail = "" if index is None else f": {name}"
    mark = "" if index is None else str(index + 1)
    parts = [Part(f"Summary{tail}", f"card{mark}", tiles=_tiles(card), text=f"{INTERVALS}.")]
    for suite in card.suites:
        figures = [draw(figure) for figure in suite.figures(card)]
        if figures:
            parts.append(Part(f"{suite.title}{tail}", f"{suite.name}{mark}", suite.title, figures=figures))
    if images:
        parts += _samples(card, tail, mark)
    return [*parts, _all_numbers(card, tail, mark)]


def _samples(card: Card, tail: str, mark: str) -> list[Part]:
    if not card.image_count or card.folder is None:
        return []
    small, sheets, text = condition_images(card.folder)
    if not text:
        return []
    return [Part(f"Sample images{tail}", f"samples{mark}", text=text, samples=small, sheets=sheets)]


def _tiles(card: Card) -> list[tuple[str, str, str]]:
    tiles = []
    for suite in card.suites:
        for key, title in suite.headline(card).items():
            number = card.numbers[key]
            heading = f"{number.setting.words}: {number.quantity.words}{number.quantity.arrow}"
            value = f"{number.text(spread=False)} {number.quantity.unit}".strip()
            notes = (number.spread_text, title, number.quantity.direction_text, number.note)
            tiles.append((heading, value, "; ".join(filter(None, notes))))
    return tiles


def _all_numbers(card: Card, tail: str, mark: str) -> Part:
    rows = []
    for (label, metric), number in card.numbers.items():
        scale = number.quantity.scale
        span = f"{scale * number.low:.4g} to {scale * number.high:.4g}" if number.has_interval else ""
        rows.append(
            [
                TableCell(number.setting.words, label),
                TableCell(f"{number.quantity.words}{number.quantity.arrow}", metric),
                TableCell(number.text(spread=False), number.value, "", span),
                TableCell(str(number.images), number.images),
                TableCell(number.note, number.note),
            ]
        )
    return Part(
        f"All numbers{tail}",
        f"numbers{mark}",
        heads=["setting", "metric", "value", "images", "note"],
        rows=rows,
        folded=f"{len(rows)} numbers with 95 % intervals",
        after="↑: higher is better; ↓: lower is better; –: no note.",
    )


def _markdown(card: Card) -> str:
    images = plural(card.image_count, "image")
    model, weights, data = map(markdown_text, (card.model, card.weights, card.data))
    lines = [f"**{model}** ({weights}) on {data}, {images}; {INTERVALS}", ""]
    if text := _unfinished(card):
        lines += [markdown_text(text), ""]
    lines += [
        "| setting | metric | value | 95 % interval | images | note |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    for (label, metric), number in card.numbers.items():
        scale, unit = number.quantity.scale, number.quantity.unit
        limits = f"[{scale * number.low:.4g}, {scale * number.high:.4g}]" if number.has_interval else ""
        cells = [
            markdown_text(label),
            markdown_text(f"{metric} {unit}"),
            markdown_text(number.text(spread=False)),
            limits,
            str(number.images),
            markdown_text(number.note),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


WIDTH, ROW, TITLE, AXIS = 520, 20, 26, 30  # pixels: of a panel, from one dot to the next, above, below
SEED_INTERVALS = (
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
        values = [
            markdown_text(cell.cell),
            str(cell.seeds),
            *(markdown_text(number_text(n)) for n in numbers),
        ]
        lines.append(f"| {' | '.join(values)} |")
    images = plural(cells[0].images, "image")
    notes = [f"{INTERVALS} {images}. table.csv has the differences to the first row."]
    if table.missing:
        notes.append(f"Not finished: {markdown_text('; '.join(table.missing))}.")
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
    finite = [value for limits in shown for value in limits if math.isfinite(value)] or [0.0, 1.0]
    room = (max(finite) - min(finite)) * 0.05 or 1.0
    low, high = min(finite) - room, max(finite) + room
    left = 12 + LETTER * max(len(number.cell) for number in numbers)
    bottom = TITLE + ROW * len(numbers)

    def at(value: float) -> str:
        return f"{left + (value - low) / (high - low) * (WIDTH - left - 14):.1f}"

    cut = " (the axis does not begin at 0)" if low > 0 else ""
    parts = [f'<text class="title" x="8" y="16">{escape(title + cut)}</text>']
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
