"""What all commands share: the progress bar, exit codes, and the lines printed at the end.

Exit codes: 0, success; 1, some images could not be used; 2, invalid input, or a file that could not be
written; 3, a run that can be resumed stopped because it could not be written; 130, interrupted.

Tables that fit the terminal. Names and numbers are never cut: headings and text are wrapped, and columns
that do not fit follow in a second table below the first.

Ctrl-C during searches: the first press ends one search, a second one within two seconds ends the command.

An interrupted search gives a map of the runs that were done and a `PartialMapWarning`. Where that
is an error, the search raises the interrupt instead (`methods.search.warn_partial`): this is how the second
press gets out of all of them.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.box import SIMPLE
from rich.cells import cell_len
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
from rich.table import Table
from rich.text import Text

from steadygaze.errors import DamagedDataWarning, DegenerateMapWarning, PartialMapWarning, RowsNotWrittenError
from steadygaze.methods.registry import Method, parse_method
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import World, world

NAMED = 20  # unreadable images that are listed at the end
INTERVAL = 15.0  # seconds between two lines of progress where there is no terminal


def guarded(out: Path, work: Callable[[World, Console], int]) -> int:
    """Run `work` in this process, which may be one of several; returns the exit code."""
    process = world()
    notes = Console(stderr=True)
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


GAP = 2  # empty characters between two columns
FRAME = 1  # and to the left of the table
TEXT = 18  # least width of a column of text
PIPE = 200  # columns of a table that is written to a file or pipe

Row = tuple[Sequence[str], str]  # cells, and the style of the row, which may be empty


@dataclass(frozen=True)
class Column:
    """A column of a table.

    kind: "name" and "number" stay whole, on one line; "text" is wrapped between words. The number of a cell
        and its interval may stand on two lines.
    """

    heading: str
    kind: Literal["name", "number", "text"] = "number"


def wide(console: Console) -> Console:
    """`console` if it is a terminal or COLUMNS is set; otherwise one of 200 columns, for files and pipes."""
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if has_width else Console(width=PIPE)


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Row], *, title: str = "", keys: int = 1
) -> None:
    """Print a table, if necessary in several parts below one another.

    keys: number of columns, from the left, that each part repeats
    """
    texts = [[str(cell) for cell in cells] for cells, _ in rows]
    styles = [style for _, style in rows]
    parts = _parts(columns, texts, keys, console.width)
    for number, (part, broken) in enumerate(parts):
        words = title if not number else "continued"
        if words:
            console.print(words, style="italic", markup=False, highlight=False)
        cells = [[row[i] for i in part] for row in texts]
        chosen = [columns[i] for i in part]
        console.print(_table(chosen, cells, styles, broken=broken, width=console.width))
    if len(parts) > 1:
        console.print(
            f"{len(columns)} columns do not fit into {console.width} characters: the table is printed in "
            f"{len(parts)} parts.",
            style="dim",
            highlight=False,
        )


def _parts(
    columns: Sequence[Column], texts: Sequence[Sequence[str]], keys: int, width: int
) -> list[tuple[list[int], bool]]:
    """The columns of each part, and whether its numbers are on two lines."""
    everything = list(range(len(columns)))
    whole, broken = (
        [_least(column, [row[i] for row in texts], on_two_lines) for i, column in enumerate(columns)]
        for on_two_lines in (False, True)
    )
    parts: list[list[int]] = [everything[:keys]]
    for i in everything[keys:]:
        if len(parts[-1]) > keys and _total([broken[k] for k in (*parts[-1], i)]) > width:
            parts.append(everything[:keys])
        parts[-1].append(i)
    return [(part, _total([whole[k] for k in part]) > width) for part in parts]


def _total(widths: Sequence[int]) -> int:
    return FRAME + sum(widths) + GAP * len(widths)


def _least(column: Column, cells: Sequence[str], broken: bool) -> int:
    """The smallest width of a column in which nothing is cut."""
    heading = max(map(cell_len, _pieces(column.heading)), default=0)
    if column.kind == "text":
        longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        return max(heading, min(longest, TEXT), min(TEXT, max(map(cell_len, cells), default=0)))
    lines = (line for cell in cells for line in (_break(cell) if broken else cell).splitlines())
    return max(heading, max(map(cell_len, lines), default=0))


def _break(cell: str) -> str:
    """A number above its interval."""
    return re.sub(r" (?=[±\[(]|to )", "\n", cell)


def _pieces(heading: str) -> list[str]:
    """Where a heading may be wrapped: at spaces, and after underscores; an arrow stays with its word."""
    return re.findall(r"[^\s_]*_|[^\s_]+(?: [↑↓])?", heading)


def _wrapped(heading: str, width: int) -> str:
    """The heading on as few lines of this width as possible."""
    lines = [""]
    for piece in _pieces(heading):
        space = " " if lines[-1] and not lines[-1].endswith("_") else ""
        if lines[-1] and cell_len(lines[-1] + space + piece) > width:
            lines.append(piece)
        else:
            lines[-1] += space + piece
    return "\n".join(lines)


def _table(
    columns: Sequence[Column],
    texts: Sequence[Sequence[str]],
    styles: Sequence[str],
    *,
    broken: bool,
    width: int,
) -> Table:
    table = Table(box=SIMPLE, padding=(0, GAP - 1, 0, 0))  # the box adds one character
    least = [_least(column, [row[i] for row in texts], broken) for i, column in enumerate(columns)]
    spare = width - _total(least)
    for i, column in enumerate(columns):
        whole = column.kind != "text" and least[i] <= width - TEXT
        full = cell_len(column.heading)
        grown = min(full, least[i] + max(0, spare)) if column.kind != "text" else full
        spare -= max(0, grown - least[i]) if column.kind != "text" else 0
        table.add_column(
            Text(_wrapped(column.heading, max(grown, least[i]))),
            justify="right" if column.kind == "number" else "left",
            no_wrap=whole,
            min_width=least[i] if whole else None,
            overflow="fold",
        )
    for row, style in zip(texts, styles, strict=True):
        cells = [
            _break(cell) if broken and column.kind == "number" else cell
            for column, cell in zip(columns, row, strict=True)
        ]
        table.add_row(*(Text(cell) for cell in cells), style=style or None)
    return table


SECONDS = 2.0  # between two presses that end everything


class Interruptions:
    """Prints what an interrupt has ended and what follows, at the moment of the interrupt.

    methods: of one call of `explain`, in order; several_classes: whether each search runs once for each class
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
