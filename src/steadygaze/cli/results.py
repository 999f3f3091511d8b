"""Commands that read the folders of runs: report, export, status and curves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from steadygaze.cli.options import OUTPUT, ExampleImages, Json, declare, declare_out, split_names
from steadygaze.cli.output import WIDTH, duration, print_line, progress_bar, stderr, stdout
from steadygaze.errors import InputError
from steadygaze.quantity import plural

if TYPE_CHECKING:
    from steadygaze.runs.status import RunStatus, ShardStatus

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Folders written by `steadygaze verify` or `steadygaze stress`, also during a run.",
    ),
]
COLUMNS = "{:<9}{:<12}{:>15}{:>22}{:>10}{:>12}"  # of the status, 80 characters
SHOWN = 40  # shards that are listed one by one; the finished and waiting ones of more are counted


def report(
    *,
    runs: Runs,
    baseline: Annotated[
        str | None,
        declare(OUTPUT, "Method that all others are compared with. Default: the best one.", metavar="METHOD"),
    ] = None,
    images: ExampleImages = True,
    out: Annotated[
        Path | None, declare_out("FILE", "HTML file to write. Default: report.html in the first folder.")
    ] = None,
    figures: Annotated[
        Path | None,
        declare(OUTPUT, "Also write the charts as SVG and PDF files into this folder.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Write the results of runs as one HTML file that works offline, plus table.csv and table.md.

    Example: steadygaze report run
    Example: steadygaze report run --figures figures
    Example: steadygaze report run-shard0 run-shard1 -o report.html
    """
    from steadygaze.report.pages import write_report

    with progress_bar(stderr()) as on_progress:
        written = write_report(
            runs, out, baseline=baseline, images=images, figures=figures, on_progress=on_progress
        )
    for path in written:
        print_line(stdout(), f"wrote {path}")
    note_incomplete(runs)


def export(
    *,
    runs: Runs,
    to: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="File to write: .parquet, .csv or .jsonl.gz. With --partition, a new folder."
        ),
    ],
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="method, setting or metric: write a folder with one Parquet file for each value.",
        ),
    ] = None,
) -> None:
    """Write the rows of runs as one table for pandas, DuckDB, Spark and the like; see docs/rows.md.

    Example: steadygaze export run --to rows.parquet
    Example: steadygaze export run --to rows --partition method
    """
    from steadygaze.runs.export import export_rows
    from steadygaze.runs.rows import Rows

    with progress_bar(stderr()) as on_progress:
        path = export_rows(Rows.read(*runs), to, partition, on_progress)
    print_line(stdout(), f"wrote {path}")
    note_incomplete(runs)


def cite(*, runs: Runs) -> None:
    """Print BibTeX entries of everything that runs used: methods, metrics, suites and models.

    Example: steadygaze cite run > references.bib
    """
    from steadygaze.runs.citations import bibtex
    from steadygaze.runs.rows import Rows

    print(bibtex(Rows.read(*runs)), end="")


def note_incomplete(folders: Sequence[Path]) -> None:
    """Warn about each run with unfinished shards: numbers from its rows are not final."""
    from steadygaze.runs.status import FINISHED, run_status

    for run in run_status(*folders):
        waiting = sum(shard.state != FINISHED for shard in run.shards)
        if waiting:
            names = " ".join(map(str, run.folders))
            shards = len(run.shards)
            missing = f" ({waiting} of {plural(shards, 'shard')} not done)" if shards > 1 else ""
            text = f"note: {names}: the run is not complete{missing}; these are its rows so far."
            print_line(stderr(), f"{text} See steadygaze status {names}", "yellow")


def status(*, runs: Runs, as_json: Json = False) -> None:
    """Show the progress of runs: shards, images, rows, errors, speed and remaining time.

    Example: steadygaze status run
    """
    from steadygaze.runs.status import run_status

    statuses = run_status(*runs)
    if as_json:
        import json

        print(json.dumps({"runs": [one.record() for one in statuses]}, indent=2))
        return
    console = stdout(WIDTH)
    for number, one in enumerate(statuses):
        for line in ["", *status_lines(one)] if number else status_lines(one):
            print_line(console, line)


def status_lines(run: RunStatus) -> list[str]:
    """The lines of one run, of at most 80 characters."""
    from steadygaze.runs.status import FINISHED, NOT_STARTED

    shards = run.shards
    whole = len(shards) == 1
    title = f"{run.kind} of {run.model} on {run.data}" + (
        "" if whole else f", {plural(len(shards), 'shard')}"
    )
    if not shards:
        return [*_wrapped(title), "no progress file: written by an earlier version, or not started"]
    speed = next((f"{shard.unit}/s" for shard in shards if shard.processes), "")
    lines = [*_wrapped(title), COLUMNS.format("shard", "state", "images", "rows", speed, "left").rstrip()]
    listed = shards if len(shards) <= SHOWN else [s for s in shards if s.state not in (FINISHED, NOT_STARTED)]
    lines += [_line("all" if whole else str(shard.shard), shard) for shard in listed]
    if not whole:
        lines.append(_summary(run))
    for shard in shards:
        if shard.state == "failed":
            lines += _wrapped(shard.error if whole else f"shard {shard.shard}: {shard.error}")
    counts = run.counts
    lines.append(f"unreadable images: {counts.unreadable}; flagged maps: {counts.flagged}")
    if run.stopped:
        names = ", ".join(str(shard.shard) for shard in run.stopped)
        lines += _wrapped("repeat the command" + ("" if whole else f" of shard {names}") + " to resume")
    return lines


def _line(name: str, shard: ShardStatus) -> str:
    from steadygaze.runs.status import FINISHED, NOT_STARTED, RUNNING

    counts, state = shard.counts, shard.state
    images = rows = rate = left = ""
    if state != NOT_STARTED:
        images, rows = _of(counts.images, counts.images_total), _of(counts.rows, counts.rows_total)
    if state == RUNNING:
        rate = f"{shard.rate:.3g}" if shard.rate else ""
        left = "" if shard.left is None else duration(shard.left)
    elif state not in (FINISHED, NOT_STARTED) and shard.seen is not None:
        rate, left = "last seen", f"{duration(shard.seen)} ago"
    return COLUMNS.format(name, state, images, rows, rate, left).rstrip()


def _summary(run: RunStatus) -> str:
    from steadygaze.runs.status import FINISHED

    counts = run.counts
    done = sum(shard.state == FINISHED for shard in run.shards)
    images_total = counts.images_total if counts.images_total is not None else run.images_total
    left = "" if run.left is None or done == len(run.shards) else duration(run.left)
    return COLUMNS.format(
        "all",
        f"{done}/{len(run.shards)} done",
        _of(counts.images, images_total),
        _of(counts.rows, counts.rows_total),
        f"{run.rate:.3g}" if run.rate else "",
        left,
    ).rstrip()


def _of(done: int, total: int | None) -> str:
    return f"{done}/{'?' if total is None else total}"


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


SHADES = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
FEW_POINTS = 60  # rows of a log whose points are drawn large enough to be distinguished
LEGEND_LINE = 16  # height of a line of the legend, in pixels
TITLE = 24  # height of a panel's title

Log = list[dict[str, str]]  # rows of log.csv


def curves(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders written by `steadygaze train`.")],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns", help="Columns of log.csv, comma-separated. Default: all columns that hold numbers."
        ),
    ] = None,
    out: Annotated[
        Path | None, declare_out("FILE", "SVG file to write. Default: curves.svg in the first folder.")
    ] = None,
) -> None:
    """Plot the training curves of one or more runs as an SVG file.

    Example: steadygaze curves run0 run1 --columns loss,accuracy -o curves.svg
    """
    from steadygaze.report.pages import write_all
    from steadygaze.training.run_files import read_log

    logs = {folder.name or str(folder): read_log(folder) for folder in runs}
    if len(logs) < len(runs):  # some have the same name
        logs = {str(folder): read_log(folder) for folder in runs}
    path = out or runs[0] / "curves.svg"
    write_all({path: draw_curves(logs, split_names(columns))})
    print_line(stdout(), f"wrote {path}")


def draw_curves(logs: dict[str, Log], columns: list[str]) -> str:
    """One panel for each column; without `columns`, for all that hold numbers."""
    from steadygaze.report.charts import HEIGHT, WIDTH, color

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


def _panel(column: str, logs: dict[str, Log]) -> str:
    from steadygaze.report.charts import lines
    from steadygaze.runs.settings import Line, LineChart

    series = []
    for number, (name, rows) in enumerate(logs.items()):
        try:
            points = [(float(row["epoch"]), float(row[column])) for row in rows if row.get(column)]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{name}: log.csv: expected numbers in epoch and {column}, got {error}"
            ) from error
        if points:
            series.append(Line(name, [x for x, _ in points], [y for _, y in points], number))
    return lines(LineChart(column, series, "epoch", ""))


def _style(logs: dict[str, Log]) -> str:
    radius = 2.4 if all(len(rows) <= FEW_POINTS for rows in logs.values()) else 1
    shades = "".join(
        f".c{i} {{ stroke: {shade}; }} circle.c{i} {{ fill: {shade}; }}" for i, shade in enumerate(SHADES)
    )
    return (
        "<style>text { font: 11px sans-serif; fill: #333; stroke: none; } "
        ".line { fill: none; stroke-width: 1.4; } "
        f".rest {{ stroke: #999; }} line {{ stroke: #ccc; }} circle {{ r: {radius}px; }} {shades}</style>"
    )
