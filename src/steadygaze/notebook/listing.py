"""A list of descriptions that shows itself as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from steadygaze.notebook.html import table

Entry = TypeVar("Entry")
WIDTH = 100  # characters of a line of text


class Listing(list[Entry]):
    """A list that a notebook shows as a table and a terminal as aligned text; otherwise a plain list.

    noun: what the entries are, in the plural      columns: the attributes of an entry that are shown

    >>> from types import SimpleNamespace
    >>> Listing([SimpleNamespace(name="gaze", cost=2.0, layers=True)], "methods", ["name", "cost", "layers"])
    1 methods
    name  cost  layers
    gaze     2  yes
    """

    def __init__(self, entries: Iterable[Entry], noun: str, columns: Sequence[str]) -> None:
        super().__init__(entries)
        self.noun, self.columns = noun, tuple(columns)

    def __repr__(self) -> str:
        if not self:
            return f"0 {self.noun}"
        heads, lines = self._texts()
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        right = self._numbers()
        rows = []
        for cells in [heads, *lines]:
            padded = [
                text.rjust(width) if column in right else text.ljust(width)
                for column, (text, width) in enumerate(zip(cells, widths, strict=True))
            ]
            rows.append(_cut("  ".join(padded).rstrip()))
        return "\n".join([f"{len(self)} {self.noun}", *rows])

    def _repr_html_(self) -> str:
        heads, lines = self._texts()
        return table(heads, lines, caption=f"{len(self)} {self.noun}", numbers=self._numbers())

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        """The headings, and the cells of each line."""
        lines = [[_text(getattr(entry, column)) for column in self.columns] for entry in self]
        return [column.replace("_", " ") for column in self.columns], lines

    def _numbers(self) -> list[int]:
        """The positions of the columns whose values are numbers."""
        if not self:
            return []
        first = [getattr(self[0], column) for column in self.columns]
        return [place for place, value in enumerate(first) if type(value) in (int, float)]


def _text(value: Any) -> str:
    """A value as text: "yes" or "-", a number without trailing zeros, options as name=default."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={default}" for name, default in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."
