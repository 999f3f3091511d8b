"""`--dry-run` of verify, stress and train: what a run will cost, as a table or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steadygaze.cli.output import duration, print_line, progress_bar
from steadygaze.progress import OnProgress
from steadygaze.runs.cost.estimate import Estimate, check_shards

WIDTH = 80  # columns of the tables


def dry_run(
    estimate: Callable[[Sequence[int], OnProgress], Estimate], shards: Sequence[int], as_json: bool
) -> int:
    """Estimate a run and print it; returns the exit code. estimate: (numbers of shards, on_progress)."""
    numbers = check_shards(shards)
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of several is enough
    notes = Console(stderr=True)
    try:
        with progress_bar(notes) as on_progress:
            found = estimate(numbers, on_progress)
    except KeyboardInterrupt:
        return 130
    if as_json:
        print(json.dumps(found.record(), indent=2))
    else:
        print_estimate(found, Console(width=WIDTH))
    return 0


def print_estimate(found: Estimate, console: Console) -> None:
    """The estimate as tables of at most 80 columns."""
    print_line(
        console, f"{found.task} of {found.model} on {found.device}: dry run, nothing is written", "bold"
    )
    facts = Table(box=SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(justify="right", no_wrap=True)
    facts.add_column()
    for fact in _facts(found):
        facts.add_row(*fact)
    console.print(facts)
    if found.parts:
        console.print(_parts(found))
    if found.shards:
        console.print(_shards(found))
    for note in found.notes:
        print_line(console, f"note: {note}", "yellow")


def _shards(found: Estimate) -> Table:
    shards = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shards.add_column("processes" if found.task == "train" else "shards", justify="right")
    shards.add_column("hours", justify="right")
    shards.add_column("time of the slowest, startup included")
    for number, seconds in found.shards.items():
        shards.add_row(f"{number:,}", f"{seconds / 3600:.2f}", duration(seconds))
    return shards


def _facts(found: Estimate) -> list[tuple[str, str, str]]:
    per_image = found.passes / found.images_left if found.images_left else 0.0
    unit = "lines of the log" if found.task == "train" else "rows"
    done = found.rows - found.rows_left
    return [
        ("images", f"{found.images_left:,}", f"of {found.images:,}"),
        ("forward passes", f"{found.passes:,.0f}", f"{per_image:,.1f} for each image"),
        (unit, f"{found.rows_left:,}", f"of {found.rows:,}; {done:,} are there" if done else ""),
        ("on disk", _bytes(found.bytes), ""),
        ("peak memory", _bytes(found.memory), "of the GPU" if "cuda" in found.device else "of the process"),
        ("time", duration(found.seconds), f"on this device, after {duration(found.startup)} of startup"),
    ]


def _parts(found: Estimate) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("part", overflow="fold")
    table.add_column("forward passes", justify="right")
    table.add_column("time", justify="right")
    for part in found.parts:
        table.add_row(escape(part.name), f"{part.passes:,.0f}", duration(part.seconds))
    return table


def _bytes(count: float) -> str:
    """Bytes as text.

    >>> _bytes(900), _bytes(45_200), _bytes(3 * 10**9)
    ('900 bytes', '45.2 kB', '3.0 GB')
    """
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:.0f} bytes"
