"""`steadygaze report` and `steadygaze export`: run folders in, files out."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from steadygaze.cli.output import progress_bar
from steadygaze.cli.status import note_incomplete
from steadygaze.report.pages import write_report
from steadygaze.runs.export import export_rows
from steadygaze.runs.rows import Rows


def run(
    runs: list[Path], out: Path | None, baseline: str | None, images: bool, console: Console | None = None
) -> int:
    """Write the report; returns the exit code."""
    console = console or Console()
    with progress_bar(Console(stderr=True)) as on_progress:
        written = write_report(runs, out, baseline=baseline, images=images, on_progress=on_progress)
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    note_incomplete(runs, Console(stderr=True))
    return 0


def export_runs(
    runs: list[Path], to: Path, partition: str | None = None, console: Console | None = None
) -> int:
    """Write the rows of runs for other tools; returns the exit code."""
    console = console or Console()
    with progress_bar(Console(stderr=True)) as on_progress:
        path = export_rows(Rows.read(*runs), to, partition, on_progress)
    console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    note_incomplete(runs, Console(stderr=True))
    return 0
