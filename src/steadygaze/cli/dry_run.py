"""`--dry-run` of verify, stress and train: what a run will cost, as a table or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from steadygaze.cli.output import duration, print_line, progress_bar
from steadygaze.progress import OnProgress
from steadygaze.runs.estimate import Estimate, check_shards

WIDTH = 80  # columns of the tables


def dry_run(
    estimate: Callable[[Sequence[int], OnProgress], Estimate], shards: Sequence[int], as_json: bool
) -> int:
    """Estimate a run and print it; returns the exit code. estimate: (numbers of shards, on_progress)."""
    numbers = check_shards(shards)
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of several is enough
    try:
        with progress_bar(Console(stderr=True)) as on_progress:
            cost = estimate(numbers, on_progress)
    except KeyboardInterrupt:
        return 130
    if as_json:
        print(json.dumps(cost.record(), indent=2))
    else:
        print_estimate(cost, Console(width=WIDTH))
    return 0


def print_estimate(cost: Estimate, console: Console) -> None:
    """Print the estimate as tables of at most 80 columns."""
    print_line(console, f"{cost.task} of {cost.model} on {cost.device}: dry run, nothing is written", "bold")
    training, done = cost.task == "train", cost.rows - cost.rows_left
    facts = Table(box=SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(justify="right", no_wrap=True)
    facts.add_column()
    facts.add_row("images", f"{cost.images_left:,}", f"of {cost.images:,}")
    facts.add_row(
        "lines of the log" if training else "rows",
        f"{cost.rows_left:,}",
        f"of {cost.rows:,}; {done:,} are there" if done else "",
    )
    startup = f"on this device, after {duration(cost.startup)} of startup"
    facts.add_row("time", duration(cost.seconds), startup)
    console.print(facts)
    if cost.shards:
        shards = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        shards.add_column("processes" if training else "shards", justify="right")
        shards.add_column("hours", justify="right")
        shards.add_column("time of the slowest, startup included")
        for number, seconds in cost.shards.items():
            shards.add_row(f"{number:,}", f"{seconds / 3600:.2f}", duration(seconds))
        console.print(shards)
    for note in cost.notes:
        print_line(console, f"note: {note}", "yellow")
