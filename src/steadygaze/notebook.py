"""HTML fragments for notebooks, and `Listing`, a list of descriptions that shows itself as a table.

Every text is escaped, and nothing in them is a script.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

if TYPE_CHECKING:
    from PIL import Image

LEFT, RIGHT = "text-align:left", "text-align:right"


def table(
    columns: Sequence[str], lines: Iterable[Sequence[str]], *, caption: str = "", numbers: Iterable[int] = ()
) -> str:
    """A table of texts.

    Args:
        numbers: The positions of columns that are aligned to the right.

    Examples:
        >>> table(["name", "cost"], [["a<b", "2"]], numbers=[1]).count("&lt;")
        1
    """
    right = set(numbers)
    styles = [RIGHT if column in right else LEFT for column in range(len(columns))]
    head = _line("th", columns, styles)
    body = "".join(_line("td", line, styles) for line in lines)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"


def _line(tag: str, cells: Sequence[str], styles: Sequence[str]) -> str:
    styled = zip(cells, styles, strict=True)
    return f"<tr>{''.join(_cell(tag, text, style) for text, style in styled)}</tr>"


def _cell(tag: str, text: str, style: str) -> str:
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'


def facts(title: str, values: Mapping[str, str]) -> str:
    """A title and a table with two columns, names and values; empty values are left out."""
    lines = "".join(
        f"<tr>{_cell('th', name, LEFT)}{_cell('td', value, LEFT)}</tr>"
        for name, value in values.items()
        if value
    )
    return f"<div><b>{escape(title)}</b></div><table><tbody>{lines}</tbody></table>"


def figure(images: Sequence[Image.Image], caption: str, *, alt: str, width: int) -> str:
    """Images side by side with a caption below them; width: of each image, in pixels."""
    shown = "".join(
        f'<img width="{width}" alt="{escape(alt)}" style="display:inline-block;margin:0 4px 0 0" '
        f'src="data:image/png;base64,{base64.b64encode(to_png(image)).decode()}">'
        for image in images
    )
    text = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure style="display:inline-block;margin:0 12px 8px 0">{shown}{text}</figure>'


def to_png(image: Image.Image) -> bytes:
    """The image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


Entry = TypeVar("Entry")
WIDTH = 100  # characters of a line of text


class Listing(list[Entry]):
    """A list that a notebook shows as a table and a terminal as aligned text; otherwise a plain list.

    Attributes:
        noun: What the entries are, in the plural.
        columns: The attributes of an entry that are shown.

    Examples:
        >>> from types import SimpleNamespace
        >>> entry = SimpleNamespace(name="gaze", cost=2.0, layers=True)
        >>> Listing([entry], "methods", ["name", "cost", "layers"])
        1 methods
        name  cost  layers
        gaze     2  yes

    A part of it is one too: `sg.list_methods()[:8]`.
    """

    def __init__(self, entries: Iterable[Entry], noun: str, columns: Sequence[str]) -> None:
        super().__init__(entries)
        self.noun, self.columns = noun, tuple(columns)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Entry: ...

    @overload
    def __getitem__(self, key: slice) -> Listing[Entry]: ...

    def __getitem__(self, key: SupportsIndex | slice) -> Entry | Listing[Entry]:
        if isinstance(key, slice):
            return Listing(super().__getitem__(key), self.noun, self.columns)
        return super().__getitem__(key)

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
            line = "  ".join(padded).rstrip()
            rows.append(line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "...")
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
