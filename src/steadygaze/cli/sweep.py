"""`steadygaze sweep`: a grid of training runs, each measured by `stress`, and one table of them.

Exit codes: as for `train`; 3 if the training of a run stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steadygaze.cli.output import Column, duration, print_line, progress_bar, wide
from steadygaze.cli.output import print_table as print_columns
from steadygaze.cli.train import supervised
from steadygaze.report.pages import SEED_INTERVALS, write_sweep
from steadygaze.runs.estimate import estimate_train
from steadygaze.runs.shards import Shard
from steadygaze.runs.statistics import plural, small_sample_note
from steadygaze.runs.sweep import SweepRun, SweepTable, plan_runs, run_sweep, summarize
from steadygaze.training.recipe import recipe_text, shipped_recipes
from steadygaze.training.sweep import Sweep, parse_grid, read_sweep

WIDTH = 80  # columns of the tables
STYLE = {"better": "green", "worse": "red"}


def run(
    source: str,
    out: Path,
    settings: list[str],
    seeds: int | None,
    shard: Shard,
    device: str,
    command: str,
    *,
    dry_run: bool = False,
    trust_remote_code: bool = False,
) -> int:
    """Train, measure and print the table; returns the exit code."""
    console, notes = Console(width=WIDTH), Console(stderr=True)
    sweep = read_sweep(source, parse_grid(settings), seeds)
    runs = plan_runs(sweep, out)
    if dry_run:
        return _estimate(sweep, runs, device, trust_remote_code=trust_remote_code)
    part = f", shard {shard}" if shard else ""
    print_line(notes, f"{plural(len(runs), 'run')}: {_shape(sweep)}{part}")
    with supervised(out) as on_progress:
        result = run_sweep(
            runs,
            shard=shard,
            device=device,
            command=command,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    table = summarize(runs)
    if table.numbers:
        print_table(table, console)
        for file in write_sweep(table, out, command):
            print_line(console, f"wrote {file}")
    if table.missing:
        more = f" and {len(table.missing) - 3} more" if len(table.missing) > 3 else ""
        advice = "Run the other shards, then repeat the command without --shard." if shard else ""
        listed = f"not finished: {'; '.join(table.missing[:3])}{more}."
        print_line(console, f"{listed} {advice or 'Repeat the command.'}", "yellow")
    for label, reason in result.failed.items():
        print_line(notes, f"stopped: {label}: {reason}", "red")
    if result.failed:
        return 3
    if result.unreadable:
        print_line(notes, f"{plural(result.unreadable, 'image')} could not be read and were skipped", "red")
    return 1 if result.unreadable else 0


def _shape(sweep: Sweep) -> str:
    parts = [plural(len(values), f"value of {key}", f"values of {key}") for key, values in sweep.grid.items()]
    return " x ".join([*parts, plural(sweep.seeds, "seed")])


def print_table(table: SweepTable, console: Console) -> None:
    """One section for each number, in at most 80 columns."""
    rich = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    rich.add_column("", overflow="fold")
    rich.add_column("seeds", justify="right")
    for column in ("mean", "95 %", "to first", "95 %"):
        rich.add_column(column, justify="right", no_wrap=True)
    for title in table.titles:
        rich.add_row(f"[bold]{escape(title)}[/bold]")
        for number in table.of(title):
            quantity, gap = number.quantity, ["", ""]
            own = [
                quantity.text(number.value),
                f"[{quantity.text(number.low)}, {quantity.text(number.high)}]",
            ]
            if number.difference is not None:
                digits = len(quantity.text(0).partition(".")[2])
                value, low, high = (f"{quantity.scale * v:+.{digits}f}" for v in number.difference)
                gap = [value, f"[{low}, {high}]"]
            cells = [f"  {escape(number.cell)}", str(number.seeds), *map(escape, (*own, *gap))]
            rich.add_row(*cells, style=STYLE.get(number.verdict))
        rich.add_section()
    console.print(rich)
    print_line(console, SEED_INTERVALS)
    few = min(number.seeds for number in table.numbers)
    if few < 3:
        print_line(console, f"{plural(few, 'seed')}: an interval over seeds needs three or more", "yellow")
    if caution := small_sample_note(min(number.images for number in table.numbers)):
        print_line(console, caution, "yellow")


def _estimate(sweep: Sweep, runs: Sequence[SweepRun], device: str, *, trust_remote_code: bool) -> int:
    """Print the runs, and what the training of those that are left will take."""
    console, notes = wide(Console()), Console(stderr=True)
    remaining = [run for run in runs if not run.is_done()]
    print_line(console, f"{plural(len(runs), 'run')}: {_shape(sweep)}; dry run, nothing is written", "bold")
    for run in runs:
        print_line(console, f"  {run.folder}{'' if run in remaining else ' (finished)'}")
    if not remaining:
        return 0
    with progress_bar(notes) as on_progress:
        first = remaining[0]
        cost = estimate_train(
            first.recipe,
            first.folder,
            device=device,
            on_progress=on_progress,
            trust_remote_code=trust_remote_code,
        )
    one_run = cost.startup + cost.seconds
    print_line(
        console,
        f"training: {duration(one_run)} for {first.label}; {plural(len(remaining), 'run')} left, about "
        f"{duration(one_run * len(remaining))}. Measuring is not included.",
    )
    return 0


def list_sweeps() -> int:
    """Print the shipped sweeps."""
    rows: list[tuple[list[str], str]] = []
    for name in shipped_recipes("sweep"):
        sweep = read_sweep(name)
        runs = plural(len(sweep.cells()) * sweep.seeds, "run")
        result = [f"result: {sweep.result}"] if sweep.result else []
        rows.append(([name, "\n".join([sweep.about, f"{runs} of {sweep.recipe}", *result, ""])], ""))
    columns = [Column("sweep", "name"), Column("description, runs, measured result", "text")]
    print_columns(wide(Console()), columns, rows, title=plural(len(rows), "sweep"))
    return 0


def show_sweep(name: str) -> int:
    """Print the text of a sweep or recipe."""
    read_sweep(name)  # an error if it is not valid
    print(recipe_text(name, "sweep", "recipe"), end="")
    return 0
