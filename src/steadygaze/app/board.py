"""The board of patches under "What if?": the image and its map, on which patches are removed.

It is drawn and operated in the browser (`board.html`, `board.js`, `page.css`), so that no click has to wait
for the server. Its value is the list of removed patches, in raster order.
"""

from __future__ import annotations

from base64 import b64encode
from importlib.resources import files
from io import BytesIO
from typing import Any

import gradio as gr
from PIL import Image

from steadygaze.errors import InputError

NOTHING = {"image": "", "map": "", "caption": "", "rows": 1, "columns": 1}


def patch_board() -> gr.HTML:
    """An empty board. Its event `input` is a change by the user, after the end of each click or drag."""
    here = files(__package__)
    template, script = ((here / name).read_text(encoding="utf-8") for name in ("board.html", "board.js"))
    # the template has no placeholders: gradio would evaluate what it puts there as JavaScript
    return gr.HTML([], html_template=template, js_on_load=script, panes=NOTHING, elem_classes="sg-plain")


def panes(
    grid: tuple[int, int], image: Image.Image, heatmap: Image.Image | None = None, caption: str = ""
) -> dict[str, Any]:
    """What a board shows: an image, and a map of the same patches beside it with its caption."""
    rows, columns = grid
    shown = "" if heatmap is None else data_url(heatmap)
    return {"image": data_url(image), "map": shown, "caption": caption, "rows": rows, "columns": columns}


def data_url(image: Image.Image) -> str:
    """The image as PNG in a URL."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


def removed_patches(value: Any, patches: int) -> list[int]:
    """The value of a board as the browser sent it, checked."""
    numbers = value if isinstance(value, list) else [None]
    if not all(type(number) is int and 0 <= number < patches for number in numbers):
        raise InputError(
            f"removed patches: expected a list of numbers in 0..{patches - 1}, got {value!r:.60}"
        )
    return sorted(set(numbers))
