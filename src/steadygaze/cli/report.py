"""`steadygaze report`: run folders in, one HTML file and two tables out."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from steadygaze.report.html import write_report


def run(
    runs: list[Path], out: Path | None, baseline: str | None, images: bool, console: Console | None = None
) -> int:
    """Write the report; returns the exit code."""
    console = console or Console()
    for path in write_report(runs, out, baseline=baseline, images=images):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 0
