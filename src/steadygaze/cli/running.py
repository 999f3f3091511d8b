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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from steadygaze.errors import RowsNotWritten
from steadygaze.methods.search import manner
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
def progress(
    total: int, place: World, notes: Console, verb: str, unit: str
) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left, and how far a search is; plain lines now and then where nobody watches a terminal."""
    if place.rank:
        yield lambda finished, computed: None
        return
    if not sys.stderr.isatty():
        plain = _Plain(total, notes, unit)
        with manner(plain.searching):
            yield plain
        return
    columns = (TextColumn(verb), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
               TimeRemainingColumn(elapsed_when_finished=False), TextColumn("{task.description}"))  # fmt: skip
    with Progress(*columns, console=notes, transient=True, speed_estimate_period=300) as progress:
        task = progress.add_task("", total=total)
        skipped, working = 0, False

        def told(finished: int, computed: int) -> None:
            nonlocal skipped, working
            progress.update(task, description="")
            working = working or bool(computed)
            if working:
                progress.advance(task, finished)
            else:  # done before: no part of the speed
                skipped += finished
                progress.reset(task, total=total, completed=skipped)

        def searching(name: str, done: int, total: int) -> None:
            progress.update(task, description=f"{name} {done}/{total}" if done < total else "")

        with manner(searching):
            yield told


class _Plain:
    """Lines of progress, one in `EVERY` seconds at most."""

    def __init__(self, total: int, notes: Console, unit: str) -> None:
        self.total, self.notes, self.unit = total, notes, unit
        self.began = self.said = time.monotonic()
        self.finished = self.computed = 0

    def __call__(self, finished: int, computed: int) -> None:
        self.finished, self.computed = self.finished + finished, self.computed + computed
        if self.finished >= self.total or self.due():
            spent = self.said - self.began
            left = (self.total - self.finished) * spent / self.computed if self.computed else 0.0
            before = (
                f" ({self.finished - self.computed} from before)" if self.finished > self.computed else ""
            )
            say(self.notes, f"{self.finished}/{self.total} {self.unit}{before}, {duration(left)} left")

    def searching(self, name: str, done: int, total: int) -> None:
        if self.due():
            say(self.notes, f"{self.finished}/{self.total} {self.unit}; {name}: {done} of {total} runs")

    def due(self) -> bool:
        clock = time.monotonic()
        if clock - self.said < EVERY:
            return False
        self.said = clock
        return True


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )


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
