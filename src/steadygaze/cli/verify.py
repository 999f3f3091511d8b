"""`steadygaze verify`: progress while it runs, the ranking when it is done.

Exit code: 0, all is well; 1, some pictures could not be used; 2, wrong input; 3, the rows could not be written; 130,
stopped by hand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Shown

from steadygaze.errors import RowsNotWritten
from steadygaze.runs.loop import World, world
from steadygaze.runs.request import Prepared, Request, prepare_run, verify_run
from steadygaze.runs.rows import Rows
from steadygaze.runs.table import Section, better, label, number

SHOWN = 40  # lines of the printed table
NAMED = 20  # pictures named at the end
EVERY = 15.0  # seconds between lines of progress where there is no terminal


def run(request: Request, console: Console | None = None) -> int:
    """Do it; gives the exit code."""
    place = world()
    console = console or wide(Console())
    notes = Console(stderr=True)
    main = place.rank == 0
    try:
        ready = prepare_run(request, place)
        if main:
            _announce(ready, place, notes)
        total = sum(len(items) for i, items in enumerate(ready.chunks) if i % place.size == place.rank)
        with progress(total, place, notes) as told:
            rows = verify_run(request, place, told, ready)
        if not main:
            return 0
        return _close(request, rows, console)
    except RowsNotWritten as error:
        say(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        if main:
            say(notes, f"stopped; the same command goes on where it stopped ({request.out})")
        return 130
    finally:
        place.end()


def wide(console: Console) -> Console:
    """Into a file or a pipe there is no screen that a table must fit."""
    return console if console.is_terminal else Console(width=200)


def _announce(ready: Prepared, place: World, notes: Console) -> None:
    plan, request = ready.plan, ready.request
    shared = f" ({len(plan.maps)} different maps)" if len(plan.maps) < len(plan.columns) else ""
    processes = f", {place.size} processes" if place.size > 1 else ""
    what = f"{len(plan.columns)} methods with scores{shared}, {len(plan.metrics)} metrics{processes}"
    say(notes, f"{request.model}: {len(ready.found.items)} pictures, {what}")
    if ready.found.without:
        say(notes, f"{ready.found.without} pictures have no mask and are left out", "yellow")


@contextmanager
def progress(
    total: int, place: World, notes: Console, verb: str = "verifying", unit: str = "pictures"
) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left; plain lines now and then where nobody watches a terminal."""
    if place.rank:
        yield lambda finished, computed: None
        return
    if not sys.stderr.isatty():
        yield _plain(total, notes, unit)
        return
    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
               TimeRemainingColumn(elapsed_when_finished=False))  # fmt: skip
    with Progress(*columns, console=notes, transient=True, speed_estimate_period=300) as progress:
        task = progress.add_task("", total=total)
        skipped, working = 0, False

        def told(finished: int, computed: int) -> None:
            nonlocal skipped, working
            working = working or bool(computed)
            if working:
                progress.advance(task, finished)
            else:  # done before: no part of the speed
                skipped += finished
                progress.reset(task, total=total, completed=skipped)

        yield told


def _plain(total: int, notes: Console, unit: str) -> Callable[[int, int], None]:
    began = said = time.monotonic()
    finished = computed = 0

    def told(more: int, now: int) -> None:
        nonlocal finished, computed, said
        finished, computed = finished + more, computed + now
        clock = time.monotonic()
        if finished < total and clock - said < EVERY:
            return
        said = clock
        left = (total - finished) * (clock - began) / computed if computed else 0.0
        before = f" ({finished - computed} from before)" if finished > computed else ""
        say(notes, f"{finished}/{total} {unit}{before}, {duration(left)} left")

    return told


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _close(request: Request, rows: Rows, console: Console) -> int:
    """The ranking, what was flagged and what could not be read."""
    for section in rows.table().sections:
        console.print(_ranking(section))
        if len(section.lines) > SHOWN:
            say(console, f"and {len(section.lines) - SHOWN} more: steadygaze report {request.out}")
    say(console, f"rows in {request.out}; the whole story: steadygaze report {request.out}")
    flagged = rows.flagged
    if flagged:
        each = ", ".join(f"{method} {count}" for (method, _), count in flagged.items())
        kinds = " or ".join(sorted({flag for _, flag in flagged}))
        say(console, f"flagged: {sum(flagged.values())} maps ({kinds}): {each}", "yellow")
    return tell_unreadable(rows, console)


def tell_unreadable(rows: Rows, console: Console) -> int:
    """Name the pictures that could not be used; gives the exit code."""
    unreadable = rows.unreadable
    for why in list(unreadable.values())[:NAMED]:
        say(console, f"not used: {why}", "red")
    if len(unreadable) > NAMED:
        say(console, f"and {len(unreadable) - NAMED} more pictures that could not be used", "red")
    return 1 if unreadable else 0


def _ranking(section: Section) -> Shown:
    title = f"{section.model} on {section.data}, {len(section.images)} pictures; ± half of the 95 % interval"
    shown = Shown(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    shown.add_column("score", no_wrap=True)
    for metric in section.shown:
        shown.add_column(f"{label(metric)} {'↑' if better(metric) == 'higher' else '↓'}", justify="right", min_width=10)
    best = {metric: section.best(metric) for metric in section.shown}
    for line in section.lines[:SHOWN]:
        cells = []
        for metric in section.shown:
            cell = section.cells.get((metric, line))
            text = "" if cell is None else f"{number(cell.value, metric)} ±{number((cell.high - cell.low) / 2, metric)}"
            cells.append(f"[bold]{text}[/bold]" if best[metric] == line else text)
        shown.add_row(escape(line[0]), line[1], *cells)
    return shown


def say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
