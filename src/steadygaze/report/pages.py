"""The parts of pages: figures with legends, sections, table cells, and the settings of a run.

The figures that suites declare (`runs.figures`), drawn as SVG, and records as CSV.

Images that stress runs stored in their folders, for pages. Nothing is computed here.

The images that a `verify` run stored: where the leading method did best and worst, with its maps.

What the pages of a comparison share: a change as a row, a class as a row, error by corruption as bars.

The report of verify runs: ranking, curves, scatter, start layers, sample images, settings.

Writes report.html, table.csv and table.md.

The report of stress runs: the scores, a section for each suite, sample images, all numbers, how it was
run; one HTML file, table.csv, table.md.

The page of a comparison: every number before and after, classes gained and lost, changed images with their
maps.

The page of `steadygaze card`: accuracy, robustness, attention, faithfulness, maps side by side, classes
gained and lost.

The files of a sweep: table.md, table.csv and sweep.svg, a panel of dots with whiskers for each number.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from steadygaze import __version__
from steadygaze.data.datasets.tree import abbreviated
from steadygaze.errors import InputError, RowsNotWrittenError, SteadygazeError
from steadygaze.faithfulness.metric import METRICS
from steadygaze.files import write_atomic
from steadygaze.methods.registry import join_name, parse_method
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.report import charts as svg
from steadygaze.report.charts import LETTER, Bar, Series, bars, grid, lines, ticks
from steadygaze.robustness.by_class import ClassChange, Spread
from steadygaze.runs import settings as figures
from steadygaze.runs.before_after import FaithfulnessChange
from steadygaze.runs.card import Card, Change
from steadygaze.runs.compare import Comparison
from steadygaze.runs.ranking import Line, Section, quantity
from steadygaze.runs.request import CHANCE
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.samples import (
    ImageSample,
    MapSample,
    Samples,
    data_address,
    read_map_samples,
    read_setting_samples,
)
from steadygaze.runs.settings import Number
from steadygaze.runs.statistics import INTERVALS, Cell, markdown_text, plural, small_sample_note
from steadygaze.runs.sweep import SweepNumber, SweepTable
from steadygaze.target import percent
from steadygaze.untrusted import check_complete, damaged_files


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


def legend(series: Sequence[svg.Series]) -> str:
    """The legend of a chart."""
    keys = [
        f'<span><span class="key {one.color}"></span>{escape(one.name)}</span>'
        for one in series
        if one.rank < svg.COLORS
    ]
    return f'<span class="legend">{"".join(keys)}</span>'


def how(run: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings of a run of either kind, line by line; settings that it does not have are left out."""
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
    keys = [Series(name, [], [], group) for group, name in enumerate(figure.legend) if group in used]
    return Figure(figure.title, f"{escape(figure.caption)}{legend(keys) if keys else ''}", chart)


def _line_chart(figure: figures.LineChart) -> Figure:
    series = [Series(line.name, line.x, line.y, line.group, line.limits) for line in figure.lines]
    chart = lines(
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


Titled = list[tuple[str, str]]  # words and data address
NOT_STORED = (
    "Images are left out: the run stored none (it was made in memory, by version 0.1, or is unfinished)."
)


@dataclass(frozen=True)
class Shot:
    """An image with what was made of it: (words, data address)."""

    name: str
    title: str
    images: Titled


def condition_images(run: Path) -> tuple[Titled, Titled, str]:
    """One image under the conditions of the run's suites, sheets of several images, and what they are."""
    samples = read_setting_samples(run)
    if samples is None:
        return [], [], NOT_STORED
    small = [(one.title, data_address(run, one.file)) for one in samples.conditions if not one.wide]
    sheets = [(one.title, data_address(run, one.file)) for one in samples.conditions if one.wide]
    text = f"{samples.image} as the model sees it, and under conditions of the run{samples.note}."
    return small, sheets, text if small or sheets else ""


def shots_of(
    comparison: Comparison, names: Mapping[str, Sequence[str]], show: int
) -> tuple[dict[str, list[Shot]], str]:
    """The first images of each group of names that both runs stored, with the maps of both models, and what
    they are."""
    folders = [card.folder for card in (comparison.before[0], comparison.after[0])]
    stored = [None if folder is None else read_setting_samples(folder) for folder in folders]
    before, after = stored
    if before is None or after is None or folders[0] is None or folders[1] is None:
        return {}, NOT_STORED
    by_name = [{image.name: image for image in samples.images} for samples in (before, after)]
    shots: dict[str, list[Shot]] = {}
    for group, wanted in names.items():
        both = [name for name in wanted if name in by_name[0] and name in by_name[1]][:show]
        shots[group] = [
            _shot((folders[0], before, by_name[0][name]), (folders[1], after, by_name[1][name]))
            for name in both
        ]
    methods = " and ".join(dict.fromkeys((before.method, after.method)))
    count = min(len(before.images), len(after.images))
    what = f"Clean images with maps by {methods}, of the class each model predicts"
    text = f"{what}; the runs stored {count} images."
    return shots, text


def _shot(before: tuple[Path, Samples, ImageSample], after: tuple[Path, Samples, ImageSample]) -> Shot:
    run, samples, image = before
    images = [("image", data_address(run, image.file))]
    for side, (folder, own, one) in (("before", before), ("after", after)):
        words = f"{side}: {_shown_class(own, one.predicted)} {percent(one.probability)}"
        images.append((words, data_address(folder, one.map_file or one.file)))
    return Shot(image.name, _shown_class(samples, image.label), images)


def _shown_class(samples: Samples, index: int) -> str:
    name = samples.class_names.get(index)
    return f"class {index}" if name is None else name.split(",")[0]


@dataclass(frozen=True)
class Shown:
    """An image with its values; addresses: data addresses of the image and of one map for each method."""

    name: str
    title: str
    values: list[float]
    addresses: list[str]


@dataclass(frozen=True)
class Gallery:
    """Best and worst images of the first method, beside the second; or the reason why there are none."""

    methods: list[Line]
    metric: str
    best: list[Shown]
    worst: list[Shown]
    why_not: str = ""


def gallery(folder: Path | None, run: dict[str, Any]) -> Gallery:
    """The gallery of a run folder."""
    samples = None if folder is None else read_map_samples(folder)
    if samples is None or folder is None:
        return Gallery([], "", [], [], _missing(run))
    best, worst = ([_shown(folder, sample) for sample in group] for group in (samples.best, samples.worst))
    return Gallery(samples.methods, samples.metric, best, worst)


def _missing(run: dict[str, Any]) -> str:
    command = run.get("about", {}).get("command", "")
    again = f" Repeat the command to store them: {command}" if command else ""
    return f"Images are left out: the run stored none (it is unfinished).{again}"


def _shown(folder: Path, sample: MapSample) -> Shown:
    addresses = [data_address(folder, file) for file in sample.files]
    return Shown(sample.name, sample.title, sample.values, addresses)


HEADS = ["setting", "metric", "before", "after", "difference", "p", "images", "note"]
CLASS_HEADS = ["class", "before", "after", "difference", "gained", "lost", "images"]
STYLES = {"better": "good", "worse": "sure"}
HEADLINES = (  # setting and metric of the first sentence of a page, the most important first
    ("clean", "top1"),
    ("clean", "miou"),
    ("corruptions", "mean_error"),
    ("corruptions", "mean_miou"),
)


def short_list(changes: Sequence[Change]) -> list[Change]:
    """Without each severity, frame and value: what a person reads first; the rest is in the file."""
    return [change for change in changes if not change.setting.minor]


def sentence(comparison: Comparison) -> str:
    """What changed, and for which images and classes, in one sentence."""
    changes = {change.key: change for change in comparison.changes}
    known = [changes[key] for key in HEADLINES if key in changes][:2] or short_list(comparison.changes)[:1]
    card = comparison.before[0]
    images = f"On {plural(card.image_count, 'image')} of {card.data}, " if card.image_count else ""
    text = f"{images}{' and '.join(map(_change_text, known))}"
    if not comparison.turned:
        return f"{text}."
    counts = [len(comparison.turned.get(way, ())) for way in ("right", "wrong")]
    turned = f"{plural(counts[0], 'image is', 'images are')} newly correct and {counts[1]} newly wrong"
    return f"{text}: {turned} ({comparison.setting}), {_classes_text(comparison)}."


def _change_text(change: Change) -> str:
    quantity, scale = change.quantity, change.scale
    before, after = (quantity.text(side.mean) for side in (change.before, change.after))
    moved = f"{'rises' if change.difference > 0 else 'falls'} from {before} to {after}"
    moved = f"{moved if change.difference else f'stays at {after}'} {quantity.unit}".rstrip()
    gap, low, high = (f"{scale * value:+.3g}" for value in (change.difference, change.low, change.high))
    sure = change.verdict or "no significant change"
    return f"{quantity.title} ({change.setting.label}) {moved} ({sure}: {gap}, 95 % interval {low} to {high})"


def _classes_text(comparison: Comparison) -> str:
    """Which classes gained or lost significantly; at most three of each."""
    parts = []
    for verdict, ordered in (("gained", comparison.classes[::-1]), ("lost", comparison.classes)):
        names = [_class_name(comparison, c) for c in ordered if c.verdict == verdict]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} {verdict} significantly")
    return "; ".join(parts) or "and no single class gained or lost significantly"


def _class_name(comparison: Comparison, change: ClassChange) -> str:
    return comparison.class_names.get(change.label, "").split(",")[0] or f"class {change.label}"


def row(change: Change) -> list[TableCell]:
    """Cells below `HEADS`."""
    quantity, scale = change.quantity, change.scale
    span = f"{scale * change.low:+.3g} to {scale * change.high:+.3g}"
    p = change.p
    return [
        TableCell(change.setting.label, change.setting.label),
        TableCell(f"{quantity.title}{quantity.arrow}", quantity.name),
        _side(change.before, scale),
        _side(change.after, scale),
        TableCell(
            f"{scale * change.difference:+.3g}", change.difference, STYLES.get(change.verdict, ""), span
        ),
        TableCell("" if p is None else f"{p:.3f}", "" if p is None else p),
        TableCell(str(change.images), change.images),
        TableCell(change.note, change.note),
    ]


def _side(spread: Spread, scale: float) -> TableCell:
    text = "no number" if math.isnan(spread.mean) else f"{scale * spread.mean:.4g}"
    several = f"± {scale * spread.deviation:.2g} over {spread.seeds} seeds" if spread.seeds > 1 else ""
    return TableCell(text, spread.mean, "", several)


def class_rows(comparison: Comparison) -> list[list[TableCell]]:
    """Cells below `CLASS_HEADS`: the classes with any image gained or lost."""
    rows = []
    for c in comparison.classes:
        if not c.gained and not c.lost:
            continue
        class_name = comparison.class_names.get(c.label, "").split(",")[0]
        name = f"{c.label} {class_name}".strip()
        style = {"gained": "good", "lost": "sure"}.get(c.verdict, "")
        span = f"{100 * c.low:+.0f} to {100 * c.high:+.0f}"
        gap = TableCell(f"{100 * c.difference:+.0f}", c.difference, style, span)
        sides = [TableCell(f"{100 * side.value:.0f}", side.value) for side in (c.before, c.after)]
        rows.append(
            [TableCell(name, name), *sides, gap, *(TableCell(str(n), n) for n in (c.gained, c.lost, c.count))]
        )
    return rows


def change_figures(comparison: Comparison) -> list[Figure]:
    """What suites draw of both models."""
    suites = comparison.before[0].suites
    return [draw(figure) for suite in suites for figure in suite.change_figures(comparison.changes)]


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
            return write_stress(rows, out, images=images, repeats=repeats)
        return _write_verify(rows, out, baseline, images, repeats)


def _write_verify(
    rows: Rows, out: str | Path | None, baseline: str | None, images: bool, repeats: int
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
        raise RowsNotWrittenError(
            f"{error.filename or path} could not be written: {error.strerror}"
        ) from error
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
            colors=svg.COLORS,
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
        "legend": [(rank, _called(line, section)) for line, rank in ranks.items() if rank < svg.COLORS],
        "rest": max(0, len(drawn) - svg.COLORS),
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
                "rank": ranks.get(line, svg.COLORS),
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


def write_stress(
    rows: Rows, out: str | Path | None = None, *, images: bool = True, repeats: int = 2000
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
    parts = [part for i, card in enumerate(cards) for part in _parts(card, i if several else None, images)]
    leads = [text for card in cards for text in (_lead(card), _unfinished(card)) if text]
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
    return write_all(
        {path: page, path.with_name("table.csv"): records_csv(records), path.with_name("table.md"): markdown}
    )


def _lead(card: Card) -> str:
    images = f", on {plural(card.image_count, 'image')} of {card.data}" if card.image_count else ""
    return f"{card.model} under {plural(card.setting_count, 'setting')}{images}."


def _unfinished(card: Card) -> str:
    settings = card.unfinished()
    if not settings:
        return ""
    return (
        f"Not finished: {len(settings)} of {card.setting_count} settings lack images "
        f"({abbreviated(settings)}). Their numbers may be of other images than the rest; "
        "repeat the steadygaze stress command to resume."
    )


def _parts(card: Card, index: int | None, images: bool) -> list[Part]:
    tail = "" if index is None else f": {card.model} {index + 1}"
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
        for key, title in suite.tiles.items():
            number = card.numbers.get(key)
            if number is not None:
                heading = f"{number.setting.label}: {number.quantity.title}{number.quantity.arrow}"
                tiles.append((heading, _with_unit(number), _small_print(number, title)))
    return tiles


def _with_unit(number: Number) -> str:
    return f"{number.text(spread=False)} {number.quantity.unit}".strip()


def _small_print(number: Number, words: str) -> str:
    return "; ".join(filter(None, (number.spread_text, words, number.quantity.direction_text, number.note)))


def _all_numbers(card: Card, tail: str, mark: str) -> Part:
    rows = []
    for (label, metric), number in card.numbers.items():
        scale = number.quantity.scale
        span = f"{scale * number.low:.4g} to {scale * number.high:.4g}" if number.has_interval else ""
        rows.append(
            [
                TableCell(label, label),
                TableCell(f"{metric}{number.quantity.arrow}", metric),
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
            number.text(spread=False),
            limits,
            str(number.images),
            markdown_text(number.note),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TURNED = {"wrong": "Newly wrong", "right": "Newly correct"}
FIRST = (
    "After minus before on the same images. ↑: higher is better; ↓: lower is better. Colored: the paired "
    "95 % interval excludes zero."
)
NOTE = (
    "Scores, and every setting with a significant change; the others are at the end. p: McNemar's exact "
    "test of correct and wrong predictions; – where a row has none."
)


def write_comparison(comparison: Comparison, path: Path, *, show: int = 8, images: bool = True) -> list[Path]:
    """Write the page and, beside it, the numbers as .csv; returns the files."""
    with damaged_files(*folders_of(comparison)):
        return _write(comparison, path, show, images)


def folders_of(comparison: Comparison) -> list[Path]:
    """The run folders that are compared."""
    cards = (*comparison.before, *comparison.after)
    return [card.folder for card in cards if card.folder is not None]


def _write(comparison: Comparison, path: Path, show: int, images: bool) -> list[Path]:
    one, two = comparison.before[0], comparison.after[0]
    parts = [
        Part(
            "What changed",
            "changes",
            text=FIRST,
            figures=change_figures(comparison),
            heads=HEADS,
            rows=[row(c) for c in comparison.changes if c.verdict or c.setting.level is None],
            after=NOTE,
        )
    ]
    if comparison.turned:
        parts.append(classes_part(comparison))
        parts += turned_parts(comparison, show if images else 0, show)
    folded = f"{len(comparison.changes)} numbers before and after"
    everything = [row(c) for c in comparison.changes]
    parts.append(Part("All differences", "all", heads=HEADS, rows=everything, folded=folded))
    page = rendered(
        "card.html",
        [card.run for card in (*comparison.before, *comparison.after)],
        title="Before and after",
        about=f"{one.model} {two.model}",
        leads=[sentence(comparison), lead(comparison), *comparison.notes],
        parts=parts,
        beside=f"{path.with_suffix('.csv').name} in the same folder contains the numbers.",
    )
    return write_all({path: page, path.with_suffix(".csv"): records_csv(comparison.records())})


def lead(comparison: Comparison) -> str:
    """Which models, on what."""
    one, two = comparison.before[0], comparison.after[0]
    models = f"Before: {one.model} ({one.weights}). After: {two.model} ({two.weights})."
    return f"{models} {one.image_count} images of {one.data}."


def classes_part(comparison: Comparison) -> Part:
    """The classes gained and lost."""
    text = f"Accuracy by class ({comparison.setting}); intervals by Newcombe."
    rows = class_rows(comparison)
    empty = "" if rows else "No class has a newly correct or newly wrong image."
    title = "Classes gained and lost"
    return Part(title, "classes", text=text, heads=CLASS_HEADS, texts=1, rows=rows, empty=empty)


def turned_parts(comparison: Comparison, shown: int, listed: int) -> list[Part]:
    """The images that are newly wrong and newly correct: how many, their names, and maps of those the runs
    stored."""
    shots, text = shots_of(comparison, comparison.turned, shown) if shown else ({}, "")
    parts = []
    for way, names in comparison.turned.items():
        more = f" and {len(names) - listed} more" if len(names) > listed else ""
        parts.append(
            Part(
                TURNED[way],
                f"turned-{way}",
                text=f"{plural(len(names), 'image')} ({comparison.setting}). {text if names else ''}".strip(),
                shots=shots.get(way, []),
                after=", ".join(names[:listed]) + more,
            )
        )
    return parts


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
    "After minus before. ↑: higher is better; ↓: lower is better. Colored: the paired 95 % interval "
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
        return _write_card(comparison, faithfulness, path, runs, show if images else 0, show, masked)


def _write_card(
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
            tiles=_card_tiles(comparison, faithfulness),
            text="Before → after, on the same images. ↑: higher is better; ↓: lower is better.",
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
    from steadygaze.runs.suites.attention import Attention

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


def _card_tiles(
    comparison: Comparison, faithfulness: Sequence[FaithfulnessChange]
) -> list[tuple[str, str, str]]:
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


def _faithfulness_row(change: FaithfulnessChange) -> list[TableCell]:
    span = f"{change.low:+.3g} to {change.high:+.3g}"
    style = STYLES.get(change.verdict, "")
    return [
        TableCell(change.method, change.method),
        TableCell(f"{change.quantity.title}{change.quantity.arrow}", change.metric),
        *(TableCell(change.quantity.text(value), value) for value in (change.before, change.after)),
        TableCell(f"{change.difference:+.3g}", change.difference, style, span),
        TableCell(str(change.images), change.images),
    ]


def _csv(changes: Sequence[FaithfulnessChange]) -> str:
    names = [one.name for one in fields(FaithfulnessChange)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "verdict"])
    writer.writerows([*(getattr(change, name) for name in names), change.verdict] for change in changes)
    return text.getvalue()


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
