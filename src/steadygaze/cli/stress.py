"""`steadygaze stress`: progress while it runs, the scores when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from steadygaze.cli.output import (
    Column,
    guarded,
    print_line,
    print_shard,
    print_table,
    print_unreadable,
    progress_bar,
    wide,
)
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.runs.card import Card
from steadygaze.runs.loop import Pace
from steadygaze.runs.request import StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.settings import Table
from steadygaze.runs.shards import World
from steadygaze.runs.statistics import INTERVALS, plural, small_sample_note
from steadygaze.runs.stress import PreparedStress, prepare_stress, run_stress
from steadygaze.runs.suite import all_options
from steadygaze.untrusted import damaged_files


def suite_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of suites that the command does not declare itself: --NAME VALUE, or --NAME=VALUE.

    Examples:
        >>> suite_options(["--salient", "gae"])
        {'salient': 'gae'}
    """
    options: dict[str, Any] = {}
    known = all_options()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise InputError(f"expected options such as --limit 100, got {word!r}")
        if name not in known:
            raise UnknownNameError("option", flag, [f"--{one.replace('_', '-')}" for one in known])
        if not equals and not rest:
            raise InputError(f"{flag}: expected a value after it")
        options[name] = value if equals else rest.pop(0)
    return options


def estimate(request: StressRequest, shards: Sequence[int], as_json: bool) -> int:
    """Print what the request will cost; returns the exit code."""
    from steadygaze.cli.dry_run import dry_run
    from steadygaze.runs.estimate import estimate_run

    return dry_run(lambda n, report: estimate_run(request, shards=n, on_progress=report), shards, as_json)


def run(request: StressRequest, console: Console | None = None) -> int:
    """Run the command; returns the exit code."""
    assert request.out is not None

    def work(world: World, notes: Console) -> int:
        ready, pace = prepare_stress(request, world), Pace()
        if world.rank == 0:
            _announce(ready, world, notes)
        with progress_bar(notes, visible=not world.rank) as on_progress:
            rows = run_stress(request, world, on_progress, ready, pace)
        if world.rank:
            return 0
        if pace.model:
            workers = plural(ready.num_workers, "worker")
            print_line(
                notes,
                f"time: {100 * pace.share:.0f} % running the model, {100 - 100 * pace.share:.0f} % loading "
                f"images and writing rows ({workers})",
            )
        with damaged_files(*rows.folders):  # a resumed run has rows of an earlier one
            return _close(request, rows, console or wide(Console()), ready.source.damaged)

    return guarded(request.out, work)


def _announce(ready: PreparedStress, world: World, notes: Console) -> None:
    processes = f", {world.size} processes" if world.size > 1 else ""
    processes += f", shard {ready.request.shard}" if ready.request.shard else ""
    images = "" if ready.image_count is None else f"{plural(ready.image_count, 'image')}, "
    print_line(notes, f"{ready.evaluator.name}: {images}{plural(ready.setting_count, 'setting')}{processes}")
    for note in ready.notes:
        print_line(notes, f"note: {note}", "yellow")


def _close(request: StressRequest, rows: Rows, console: Console, damaged: Sequence[str]) -> int:
    for card in rows.cards():
        print_card(card, console)
        if card.image_count and (caution := small_sample_note(card.image_count)):
            print_line(console, caution, "yellow")
        for note in card.run["settings"].get("notes", ()):
            print_line(console, f"note: {note}", "yellow")
    print_line(console, f"rows in {request.out}; for a full report: steadygaze report {request.out}")
    print_shard(rows, request.out, console)
    flagged = rows.flagged
    if flagged:
        counts = ", ".join(f"{setting} {flag}: {count}" for (setting, flag), count in flagged.items())
        print_line(console, f"flagged: {counts}", "yellow")
    return print_unreadable(rows, console, damaged)


def print_card(card: Card, console: Console) -> None:
    """The tables of every suite, then the scores of whole sets."""
    data = f" on {card.data}, {plural(card.image_count, 'image')}" if card.image_count else ""
    print_line(console, f"{card.model}{data}", "bold")
    print_line(console, INTERVALS)
    for suite in card.suites:
        for table in suite.tables(card):
            _print_suite_table(table, console)
    for number in card.scores.values():
        if number.headline:
            unit = f" {number.quantity.unit}".rstrip()
            text = f"{number.setting.label} {number.quantity.title}: {number.text()}{unit} ({number.note})"
            print_line(console, text)


def _print_suite_table(table: Table, console: Console) -> None:
    columns = [Column(table.columns[0], "name"), *map(Column, table.columns[1:])]
    print_table(
        console, columns, [([cell or "-" for cell in row], "") for row in table.rows], title=table.title
    )
