"""`steadygaze verify`: progress while it runs, the ranking when it is done.

Exit code: 0, all is well; 1, some pictures could not be used; 2, wrong input; 3, the rows could not be written; 130, stopped by hand.
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

from steadygaze.runs.loop import World, world
from steadygaze.runs.request import Prepared, Request, prepare_run, verify_run
from steadygaze.runs.rows import Rows
from steadygaze.runs.store import RowsNotWritten
from steadygaze.runs.table import better, label, number

SHOWN = 40  # lines of the printed table
NAMED = 20  # pictures named at the end
EVERY = 15.0  # seconds between lines of progress where there is no terminal


def run(request: Request, console: Console | None = None) -> int:
    """Do it; gives the exit code."""
    place = world()
    console = console or Console()
    notes = Console(stderr=True)
    main = place.rank == 0
    try:
        ready = prepare_run(request, place)
        if main:
            _announce(ready, place, notes)
        total = sum(len(items) for i, items in enumerate(ready.chunks) if i % place.size == place.rank)
        with _progress(total, place, notes) as told:
            rows = verify_run(request, place, told, ready)
        if not main:
            return 0
        return _close(request, rows, console)
    except RowsNotWritten as error:
        notes.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 3
    except KeyboardInterrupt:
        if main:
            notes.print(
                f"stopped; the same command goes on where it stopped ({request.out})", markup=False, soft_wrap=True
            )
        return 130
    finally:
        place.end()


def _announce(ready: Prepared, place: World, notes: Console) -> None:
    plan, request = ready.plan, ready.request
    shared = f" ({len(plan.maps)} different maps)" if len(plan.maps) < len(plan.columns) else ""
    processes = f", {place.size} processes" if place.size > 1 else ""
    notes.print(
        f"{request.model}: {len(ready.found.items)} pictures, {len(plan.columns)} methods with scores{shared}, "
        f"{len(plan.metrics)} metrics{processes}", markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if ready.found.without:
        notes.print(f"{ready.found.without} pictures have no mask and are left out", style="yellow", highlight=False)


@contextmanager
def _progress(total: int, place: World, notes: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left; plain lines now and then where nobody watches a terminal."""
    if place.rank:
        yield lambda finished, computed: None
        return
    if not sys.stderr.isatty():
        yield _plain(total, notes)
        return
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
               TimeRemainingColumn(elapsed_when_finished=False))  # fmt: skip
    with Progress(*columns, console=notes, transient=True, speed_estimate_period=300) as progress:
        task = progress.add_task("", total=total)
        skipped = 0

        def told(finished: int, computed: int) -> None:
            nonlocal skipped
            if computed:
                progress.advance(task, finished)
            else:  # done before: no part of the speed
                skipped += finished
                progress.reset(task, total=total, completed=skipped)

        yield told


def _plain(total: int, notes: Console) -> Callable[[int, int], None]:
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
        notes.print(f"{finished}/{total} pictures{before}, {_duration(left)} left", highlight=False, soft_wrap=True)

    return told


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _close(request: Request, rows: Rows, console: Console) -> int:
    """The ranking, what was flagged and what could not be read."""
    table = rows.table()
    for section in table.sections:
        shown = Shown(
            title=f"{section.model} on {section.data}, {len(section.images)} pictures, 95 % intervals",
            title_justify="left",
            box=SIMPLE,
        )
        shown.add_column("method", no_wrap=True)
        shown.add_column("score", no_wrap=True)
        for metric in section.shown:
            shown.add_column(f"{label(metric)} {'↑' if better(metric) == 'higher' else '↓'}", justify="right")
        for line in section.lines[:SHOWN]:
            cells = []
            for metric in section.shown:
                cell = section.cells.get((metric, line))
                strong = section.best(metric) == line
                text = (
                    ""
                    if cell is None
                    else f"{number(cell.value, metric)} ({number(cell.low, metric)}–{number(cell.high, metric)})"
                )
                cells.append(f"[bold]{text}[/bold]" if strong else text)
            shown.add_row(escape(line[0]), line[1], *cells)
        console.print(shown)
        if len(section.lines) > SHOWN:
            console.print(
                f"and {len(section.lines) - SHOWN} more: steadygaze report {request.out}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    console.print(
        f"rows in {request.out}; the whole story: steadygaze report {request.out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    flagged = rows.flagged
    if flagged:
        told = ", ".join(f"{method} {count}" for (method, _), count in flagged.items())
        kinds = " or ".join(sorted({flag for _, flag in flagged}))
        console.print(
            f"flagged: {sum(flagged.values())} maps ({kinds}): {told}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    unreadable = rows.unreadable
    for why in list(unreadable.values())[:NAMED]:
        console.print(f"not used: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    if len(unreadable) > NAMED:
        console.print(
            f"and {len(unreadable) - NAMED} more pictures that could not be used", style="red", highlight=False
        )
    return 1 if unreadable else 0
