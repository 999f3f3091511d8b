"""Output that all commands share: progress bars, exit codes, tables, and messages after an interrupt.

rich is imported inside the functions: it takes 0.1 s, half the time of `steadygaze -h`.

Exit codes: 0, success; 1, some images could not be used; 2, invalid input, or a file that could not be
written; 3, a run that can be resumed stopped because it could not be written; 130, interrupted.
"""

from __future__ import annotations

import os
import re
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from steadygaze.errors import DamagedDataWarning, DegenerateMapWarning, PartialMapWarning, RowsNotWrittenError
from steadygaze.methods.registry import Method, parse_method
from steadygaze.progress import OnProgress, Progress, ignore_progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from steadygaze.runs.estimate import Estimate
    from steadygaze.runs.rows import Rows
    from steadygaze.runs.shards import World

NAMED = 20  # unreadable images that are listed at the end
INTERVAL = 15.0  # seconds between two lines of progress where there is no terminal
WIDTH = 80  # columns of the tables that fit into every terminal
STYLE = {"better": "green", "worse": "red"}  # of a row with a verdict


def stdout(width: int | None = None) -> Console:
    """Return the console of results; without `width`, as wide as the terminal."""
    from rich.console import Console

    return Console(width=width)


def wide() -> Console:
    """Return the console of results; in a file or pipe, whose width is not known, 200 columns wide."""
    console = stdout()
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if has_width else stdout(PIPE)


def stderr() -> Console:
    """Return the console of progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True)


def guarded(out: Path, work: Callable[[World, Console], int]) -> int:
    """Run `work` in this process, which may be one of several; returns the exit code."""
    from steadygaze.runs.shards import world

    process = world()
    notes = stderr()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamagedDataWarning)  # printed at the end, with what was not used
            return work(process, notes)
    except RowsNotWrittenError as error:
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

    Args:
        visible: False in all but the first of several processes.
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
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

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
        from rich.markup import escape

        name = progress.task
        if name not in self.bar_of:
            self.bar_of[name] = self.bars.add_task(
                escape(name), total=progress.total, unit=progress.unit, detail=""
            )
            self.resumed[name] = 0
        bar = self.bar_of[name]
        if progress.resumed != self.resumed[name]:
            # what an earlier run finished does not count for the speed
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

    Examples:
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

    Examples:
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

    Args:
        damaged: Shards of the data that could not be read whole.
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


TEXT = 18  # smallest width of a column of text
PIPE = 200  # columns of a table that is written to a file or pipe

Row = tuple[Sequence[str], str]  # cells, and the style of the row, which may be empty


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        heading (str): may be wrapped at spaces and after underscores.
        kind (str): "name" and "number" are not wrapped; "text" is wrapped between words.
    """

    heading: str
    kind: Literal["name", "number", "text"] = "number"

    def wrapped(self, width: int = 1) -> str:
        """Wrap the heading to `width` characters where possible; an arrow stays with its word."""
        pieces = re.sub(r" (?=[↑↓])", "\N{NO-BREAK SPACE}", self.heading).replace("_", "_ ")
        lines = textwrap.wrap(pieces, width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines).replace("_ ", "_").replace("\N{NO-BREAK SPACE}", " ")


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Row], *, title: str = "", keys: int = 1
) -> None:
    """Print a table; columns that do not fit into the terminal follow in further tables below.

    Args:
        console (Console): where to print.
        columns (Sequence[Column]): headings and kinds.
        rows (Sequence[Row]): the cells and the style of each row.
        title (str): printed above the table.
        keys (int): number of columns, from the left, that each part repeats.
    """
    from rich.box import SIMPLE
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    least, whole = [], []  # widths of the columns with headings wrapped and on one line
    for i, column in enumerate(columns):
        longest = max((cell_len(cells[i]) for cells, _ in rows), default=0)
        longest = min(longest, TEXT) if column.kind == "text" else longest
        least.append(max(longest, *map(cell_len, column.wrapped().split("\n"))))
        whole.append(max(longest, cell_len(column.heading)))

    def fits(widths: Sequence[int]) -> bool:
        return 2 + sum(width + 2 for width in widths) <= console.width  # rich's margin and gaps

    widths = whole if fits(whole) else least
    parts = [list(range(keys))]
    for i in range(keys, len(columns)):
        if len(parts[-1]) > keys and not fits([widths[k] for k in (*parts[-1], i)]):
            parts.append(list(range(keys)))
        parts[-1].append(i)
    for number, part in enumerate(parts):
        heading = "continued" if number else title or None
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=heading, title_justify="left")
        for i in part:
            kind = columns[i].kind
            keep = kind != "text" and widths[i] <= console.width - TEXT
            table.add_column(
                Text(columns[i].wrapped(widths[i])),
                justify="right" if kind == "number" else "left",
                no_wrap=keep,
                min_width=widths[i] if keep else None,
                overflow="fold",
            )
        for cells, style in rows:
            table.add_row(*(Text(cells[i]) for i in part), style=style or None)
        console.print(table)


def dry_run(estimate: Callable[..., Estimate], shards: Sequence[int], as_json: bool) -> int:
    """Estimate a run and print it; returns the exit code. estimate: takes `shards` and `on_progress`."""
    import json

    from steadygaze.runs.estimate import check_shards

    numbers = check_shards(shards)
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of several is enough
    try:
        with progress_bar(stderr()) as on_progress:
            cost = estimate(shards=numbers, on_progress=on_progress)
    except KeyboardInterrupt:
        return 130
    if as_json:
        print(json.dumps(cost.record(), indent=2))
    else:
        print_estimate(cost, stdout(WIDTH))
    return 0


def print_estimate(cost: Estimate, console: Console) -> None:
    """Print the estimate as tables of at most 80 columns."""
    from rich.box import SIMPLE
    from rich.table import Table

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


SECONDS = 2.0  # between two presses that end everything


class Interruptions:
    """Prints what an interrupt has ended and what follows, at the moment of the interrupt.

    Attributes:
        methods: Of one call of `explain`, in order.
        several_classes: Whether each search runs once for each class.
    """

    def __init__(
        self, console: Console, methods: Sequence[str | Method], *, several_classes: bool = False
    ) -> None:
        parsed = [parse_method(method) if isinstance(method, str) else method for method in methods]
        self.searches = [method for method in parsed if method.base.kind == "model"]
        self.console, self.several_classes = console, several_classes
        self.messages: list[str] = []
        self.pressed = -SECONDS

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Handle the warnings of a call of `explain`."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DegenerateMapWarning
            )  # reported at the end, with the image's name
            warnings.simplefilter("always", PartialMapWarning)
            show = warnings.showwarning

            def showwarning(
                message: Warning | str,
                category: type[Warning],
                filename: str,
                lineno: int,
                file: TextIO | None = None,
                line: str | None = None,
            ) -> None:
                if isinstance(message, PartialMapWarning):
                    self.add(message)
                else:
                    show(message, category, filename, lineno, file, line)

            warnings.showwarning = showwarning
            yield

    def add(self, warning: PartialMapWarning) -> None:
        """Print what happens; raises the warning if it is the second within two seconds."""
        now = time.monotonic()
        if now - self.pressed < SECONDS:
            raise warning
        self.pressed = now
        text = str(warning)
        self.messages.append(text)
        following = self.following(text)
        if following:
            text += f" Continuing with {following}; press Ctrl-C again within {SECONDS:g} seconds to stop."
        print_line(self.console, text, "yellow")

    def following(self, message: str) -> str:
        """The searches after the one that a message is about; "" if it was the last."""
        stem = message.partition(":")[0].partition(",")[0]
        names = [search.name for search in self.searches]
        position = next((i for i, search in enumerate(self.searches) if search.stem == stem), len(names))
        rest = names[position + 1 :]
        return ", ".join(["the other classes", *rest] if self.several_classes else rest)

    def take(self) -> list[str]:
        """The messages since the last call."""
        messages, self.messages = self.messages, []
        return messages
