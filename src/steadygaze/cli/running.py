"""What the commands that make runs share: progress while one runs, how it ends, and what could not be used.

Exit code: 0, all is well; 1, some pictures could not be used; 2, wrong input; 3, the rows could not be written; 130,
stopped by hand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from steadygaze.errors import RowsNotWritten
from steadygaze.runs.loop import World, world
from steadygaze.runs.rows import Rows

NAMED = 20  # pictures named at the end
EVERY = 15.0  # seconds between lines of progress where there is no terminal


def guarded(out: Path, work: Callable[[World, Console], int]) -> int:
    """Do the work of this process, which may be one of several; gives the exit code."""
    place = world()
    notes = Console(stderr=True)
    try:
        return work(place, notes)
    except RowsNotWritten as error:
        say(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        if place.rank == 0:
            say(notes, f"stopped; the same command goes on where it stopped ({out})")
        return 130
    finally:
        place.end()


def wide(console: Console) -> Console:
    """Into a file or a pipe there is no screen that a table must fit."""
    return console if console.is_terminal else Console(width=200)


@contextmanager
def progress(total: int, place: World, notes: Console, verb: str, unit: str) -> Iterator[Callable[[int, int], None]]:
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


def tell_unreadable(rows: Rows, console: Console) -> int:
    """Name the pictures that could not be used; gives the exit code."""
    unreadable = rows.unreadable
    for why in list(unreadable.values())[:NAMED]:
        say(console, f"not used: {why}", "red")
    if len(unreadable) > NAMED:
        say(console, f"and {len(unreadable) - NAMED} more pictures that could not be used", "red")
    return 1 if unreadable else 0


def say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
