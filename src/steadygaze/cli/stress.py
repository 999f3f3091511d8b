"""`steadygaze stress`: progress while it runs, the scores when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from steadygaze.cli.options import DryRun, ModelOptions, read, read_request, takes
from steadygaze.cli.output import (
    Column,
    dry_run,
    guarded,
    print_line,
    print_shard,
    print_table,
    print_unreadable,
    progress_bar,
    wide,
)
from steadygaze.cli.paths import check_paths
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.quantity import plural
from steadygaze.runs.request import SUITE_OPTIONS, StressRequest

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.runs.card import Card
    from steadygaze.runs.rows import Rows
    from steadygaze.runs.shards import World
    from steadygaze.runs.stress import PreparedStress


@takes(StressRequest, SUITE_OPTIONS, ModelOptions, DryRun)
def stress(context: typer.Context, **values: Any) -> None:
    """Measure robustness: accuracy, calibration and attention under corruption, shift, attack and occlusion.

    Prints the scores of each suite and writes one row per image, setting and metric. Options of suites from
    other packages are accepted too: --NAME VALUE.

    Example: steadygaze stress -m embedded -d photos --suites corruptions,occlusion -o run
    Example: steadygaze stress -m resnet50 -d imagenet/val -n 500 --suites corruptions --severities 3 -o run
    Example: steadygaze stress -m deit_small_patch16_224 --suites shift:imagenet-a=imagenet-a -o run
    """
    check_paths(values)
    from steadygaze.runs.loop import Pace
    from steadygaze.runs.stress import prepare_stress, run_stress
    from steadygaze.untrusted import damaged_files

    numbers = read(DryRun, values).numbers
    declared = {name: values[name] or None for name in SUITE_OPTIONS}
    suite_options = {**declared, **other_suite_options(context.args)}
    request = read_request(StressRequest, values, options=suite_options)
    if values["dry_run"]:
        from steadygaze.runs.estimate import estimate_run

        raise typer.Exit(dry_run(partial(estimate_run, request), numbers, values["json"]))
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
            return _print_results(request, rows, wide(), ready.source.damaged)

    raise typer.Exit(guarded(request.out, work))


def other_suite_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of suites that the command does not declare itself: --NAME VALUE, or --NAME=VALUE.

    Examples:
        >>> other_suite_options(["--salient", "gae"])
        {'salient': 'gae'}
    """
    from steadygaze.runs.suite import all_options

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


def _announce(ready: PreparedStress, world: World, notes: Console) -> None:
    """Print what will be measured, and what is left out."""

    processes = f", {world.size} processes" if world.size > 1 else ""
    processes += f", shard {ready.request.shard}" if ready.request.shard else ""
    images = "" if ready.image_count is None else f"{plural(ready.image_count, 'image')}, "
    print_line(notes, f"{ready.evaluator.name}: {images}{plural(ready.setting_count, 'setting')}{processes}")
    for note in ready.notes:
        print_line(notes, f"note: {note}", "yellow")


def _print_results(request: StressRequest, rows: Rows, console: Console, damaged: Sequence[str]) -> int:
    """Print the scores, flags and unreadable images; returns the exit code."""
    from steadygaze.runs.statistics import small_sample_note

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
    from steadygaze.runs.statistics import INTERVALS

    data = f" on {card.data}, {plural(card.image_count, 'image')}" if card.image_count else ""
    print_line(console, f"{card.model}{data}", "bold")
    print_line(console, INTERVALS)
    for suite in card.suites:
        for table in suite.tables(card):
            columns = [Column(table.columns[0], "name"), *map(Column, table.columns[1:])]
            rows = [([cell or "-" for cell in row], "") for row in table.rows]
            print_table(console, columns, rows, title=table.title)
    for number in card.scores.values():
        if number.headline:
            unit = f" {number.quantity.unit}".rstrip()
            text = f"{number.setting.label} {number.quantity.title}: {number.text()}{unit} ({number.note})"
            print_line(console, text)
