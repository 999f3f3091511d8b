"""Tables that fit the terminal. Names and numbers are never cut: headings and text are wrapped, and columns
that do not fit follow in a second table below the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
