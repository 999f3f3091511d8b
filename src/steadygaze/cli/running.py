"""What all commands share: the progress bar, exit codes, and the lines printed at the end.

Exit codes: 0, success; 1, some images could not be used; 2, invalid input, or a file that could not be
written; 3, a run that can be resumed stopped because it could not be written; 130, interrupted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from steadygaze.errors import DamagedData, RowsNotWritten
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.processes import World, world
from steadygaze.runs.rows import Rows

NAMED = 20  # unreadable images that are listed at the end
INTERVAL = 15.0  # seconds between two lines of progress where there is no terminal


def guarded(out: Path, work: Callable[[World, Console], int]) -> int:
    """Run `work` in this process, which may be one of several; returns the exit code."""
    process = world()
    notes = Console(stderr=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamagedData)  # printed at the end, with what was not used
            return work(process, notes)
    except RowsNotWritten as error:
        print_line(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        if process.rank == 0:
            print_line(notes, f"interrupted; repeat the command to resume ({out})")
        return 130
    finally:
        process.end()


@contextmanager
def progress_bar(console: Console, *, visible: bool = True) -> Iterator[OnProgress]:
    """A callback for `on_progress`: shows bars on a terminal, and otherwise prints a line every 15 seconds.

    visible: false in all but the first of several processes
    """
    if not visible:
        yield ignore_progress
    elif console.is_terminal:
        display = BarDisplay(console)
        with display.bars:
            yield display
    else:
        yield LineDisplay(console)


class BarDisplay:
    """One bar for each task that is running, with the time left; erased at the end."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[detail]}"),
        )
        self.bars = Bars(*columns, console=console, transient=True, speed_estimate_period=300)
        self.bar_of: dict[str, TaskID] = {}
        self.resumed: dict[str, int] = {}

    def __call__(self, progress: Progress) -> None:
        name = progress.task
        if name not in self.bar_of:
            self.bar_of[name] = self.bars.add_task(
                escape(name), total=progress.total, unit=progress.unit, detail=""
            )
            self.resumed[name] = 0
        bar = self.bar_of[name]
        if progress.resumed != self.resumed[name]:
            # what an earlier run finished is no part of the speed
            self.resumed[name] = progress.resumed
            self.bars.reset(bar, completed=progress.done)
        detail = escape(progress.detail)
        self.bars.update(
            bar, total=progress.total, completed=progress.done, unit=progress.unit, detail=detail
        )
        if progress.fraction == 1:
            self.bars.remove_task(self.bar_of.pop(name))


class LineDisplay:
    """Lines of progress, at most one every `INTERVAL` seconds, and one at the end of each outer task."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started: dict[str, float] = {}
        self.printed = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        started = self.started.setdefault(progress.task, now)
        outer = next(iter(self.started)) == progress.task  # not a search inside a run
        finished = progress.fraction == 1
        if now - self.printed >= INTERVAL or (finished and outer):
            self.printed = now
            print_line(self.console, progress_line(progress, now - started))
        if finished:
            del self.started[progress.task]


def progress_line(progress: Progress, seconds: float) -> str:
    """One line of text; seconds: how long the task has been running.

    >>> progress_line(Progress("verify", 30, 100, "images", resumed=10), 60)
    'verify: 30/100 images (10 resumed), 3 min 30 s left'
    """
    total = "?" if progress.total is None else progress.total
    text = f"{progress.task}: {progress.done}/{total} {progress.unit}"
    if progress.resumed:
        text += f" ({progress.resumed} resumed)"
    computed = progress.done - progress.resumed
    if progress.total is not None and computed > 0 and progress.done < progress.total:
        text += f", {duration((progress.total - progress.done) * seconds / computed)} left"
    return f"{text}  {progress.detail}".rstrip()


def duration(seconds: float) -> str:
    """Seconds as text.

    >>> duration(5), duration(210), duration(7300)
    ('5 s', '3 min 30 s', '2 h 01 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def print_shard(rows: Rows, out: Path | None, console: Console) -> None:
    """Print that a table covers a part of the run only, if it does."""
    if rows.shard and not len(rows) and not rows.unreadable:
        print_line(
            console,
            f"shard {rows.shard} has nothing to compute: the run has fewer batches than shards. To use all "
            "jobs, choose fewer shards, or a smaller --batch-size and another output folder",
            "yellow",
        )
    elif rows.shard:
        print_line(
            console,
            f"shard {rows.shard}: the numbers above are of this part of the run only. All shards together: "
            f"steadygaze report {out}, followed by the folders of the other shards if they have their own",
            "yellow",
        )


def print_unreadable(rows: Rows, console: Console, damaged: Sequence[str] = ()) -> int:
    """List the images that could not be used; returns the exit code.

    damaged: shards of the data that could not be read whole
    """
    unreadable = [*damaged, *rows.unreadable.values()]
    for reason in unreadable[:NAMED]:
        print_line(console, f"not used: {reason}", "red")
    if len(unreadable) > NAMED:
        print_line(console, f"and {len(unreadable) - NAMED} more images that could not be used", "red")
    return 1 if unreadable else 0


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: no markup, no highlighting, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
