"""`steadygaze status`: how far the shards of runs have come, in 80 columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from rich.console import Console

from steadygaze.cli.output import duration, print_line
from steadygaze.runs.statistics import plural
from steadygaze.runs.status import FINISHED, NOT_STARTED, RUNNING, RunStatus, ShardStatus, run_status

WIDTH = 80
COLUMNS = "{:<9}{:<12}{:>15}{:>22}{:>10}{:>12}"  # 80 characters
SHOWN = 40  # shards that are listed one by one; the finished and waiting ones of more are counted


def run(folders: Sequence[Path], as_json: bool, console: Console | None = None) -> int:
    """Print the status; returns the exit code."""
    console = console or Console(width=WIDTH)
    runs = run_status(*folders)
    if as_json:
        print(json.dumps({"runs": [one.record() for one in runs]}, indent=2))
        return 0
    for number, one in enumerate(runs):
        if number:
            print_line(console, "")
        for line in status_lines(one):
            print_line(console, line)
    return 0


def note_incomplete(folders: Sequence[Path], console: Console) -> None:
    """Warn about each run with unfinished shards: numbers from its rows are not final."""
    for run in run_status(*folders):
        waiting = sum(shard.state != FINISHED for shard in run.shards)
        if waiting:
            names = " ".join(map(str, run.folders))
            shards = len(run.shards)
            missing = f" ({waiting} of {plural(shards, 'shard')} not done)" if shards > 1 else ""
            text = f"note: {names}: the run is not complete{missing}; these are its rows so far."
            print_line(console, f"{text} See steadygaze status {names}", "yellow")


def status_lines(run: RunStatus) -> list[str]:
    """The lines of one run, of at most 80 characters."""
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
    rate = f"{shard.rate:.3g}" if shard.state == RUNNING and shard.rate else ""
    left = "" if shard.left is None or shard.state != RUNNING else duration(shard.left)
    if shard.state not in (FINISHED, NOT_STARTED, RUNNING) and shard.seen is not None:
        left = f"{duration(shard.seen)} ago"
        return _row(name, shard.state, shard, "last seen", left)
    return _row(name, shard.state, shard, rate, left)


def _summary(run: RunStatus) -> str:
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


def _row(name: str, state: str, shard: ShardStatus, rate: str, left: str) -> str:
    counts = shard.counts
    images = rows = ""
    if state != NOT_STARTED:
        images, rows = _of(counts.images, counts.images_total), _of(counts.rows, counts.rows_total)
    return COLUMNS.format(name, state, images, rows, rate, left).rstrip()


def _of(done: int, total: int | None) -> str:
    return f"{done}/{'?' if total is None else total}"


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
