"""Commands that read the results of runs: report, export, status, compare-models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli import options
from steadygaze.cli.options import OUTPUT

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Folders written by `steadygaze verify` or `steadygaze stress`, also during a run.",
    ),
]


def report(
    *,
    runs: Runs,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Method that all others are compared with. Default: the best one.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    images: options.ExampleImages = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="HTML file to write. Default: report.html in the first folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Write the results of runs as one HTML file that works offline, plus table.csv and table.md.

    Example: steadygaze report run
    Example: steadygaze report run-shard0 run-shard1 -o report.html
    """
    from steadygaze.cli.report import run

    raise typer.Exit(run(runs, out, baseline, images))


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
    from steadygaze.cli.report import export_runs

    raise typer.Exit(export_runs(runs, to, partition))


def status(
    *,
    runs: Runs,
    as_json: options.Json = False,
) -> None:
    """Show the progress of runs: shards, images, rows, errors, speed and remaining time.

    Example: steadygaze status run
    """
    from steadygaze.cli.status import run

    raise typer.Exit(run(runs, as_json))


def compare_models(
    *,
    before: options.StressRun,
    after: Annotated[str, typer.Argument(help="The same for the other model, on the same images.")],
    setting: Annotated[
        str, typer.Option(help="Setting in which classes and individual images are compared.")
    ] = "clean",
    seen: options.Seen = None,
    by_class: options.ByClass = False,
    show: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Number of newly wrong and newly correct images to show.",
            rich_help_panel=OUTPUT,
        ),
    ] = 8,
    images: options.ExampleImages = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="HTML file to write. Default: compare.html in the second folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Compare two stress runs: paired differences of all metrics, changes by class and by image.

    Example: steadygaze compare-models run-before run-after
    Example: steadygaze compare-models before0,before1,before2 after0,after1,after2 -o compare.html
    """
    from steadygaze.cli.compare import run

    raise typer.Exit(run(before, after, out, setting, show, images, seen=seen, by_class=by_class))
