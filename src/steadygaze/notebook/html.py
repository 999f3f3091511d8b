"""HTML fragments for notebooks. Every text is escaped, and nothing in them is a script."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from PIL import Image

LEFT, RIGHT = "text-align:left", "text-align:right"


def table(
    columns: Sequence[str], lines: Iterable[Sequence[str]], *, caption: str = "", numbers: Iterable[int] = ()
) -> str:
    """A table of texts.

    numbers: the positions of columns that are aligned to the right

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
