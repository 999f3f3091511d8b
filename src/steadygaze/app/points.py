"""The pixel that the page of a segmenter asks about: a click on the image sets it.

Every event of the page gets the pixel, and is answered by the classifier of that pixel's class.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from steadygaze.app.viewer import Viewer
from steadygaze.errors import BadInput
from steadygaze.questions.ask import ask
from steadygaze.questions.region_targets import segments
from steadygaze.questions.regions import Region

FIRST_POINT = ""  # the centre of the image
MARK = 6  # pixels, radius of the mark


def needs_point(viewer: Viewer) -> bool:
    """Whether the viewer's model gives a class for each pixel."""
    return segments(viewer.loaded)


def parse_point(viewer: Viewer, text: Any) -> tuple[int, int]:
    """x and y in the text "x, y"; the centre of the image if it is empty."""
    height, width = viewer.loaded.size
    if text is None or text == "":
        return width // 2, height // 2
    numbers = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", text) if isinstance(text, str) else None
    if numbers is None:
        raise BadInput(f"pixel: expected x, y such as {width // 2}, {height // 2}, got {text!r:.40}")
    return int(numbers[1]), int(numbers[2])


def with_point(viewer: Viewer, text: Any) -> Viewer:
    """The viewer of the classifier of one pixel."""
    return _with_point(viewer, parse_point(viewer, text))


@lru_cache(maxsize=8)
def _with_point(viewer: Viewer, point: tuple[int, int]) -> Viewer:
    return replace(viewer, loaded=ask(viewer.loaded, region=Region(point=point)))


def marked(viewer: Viewer, image: Path | None, text: Any) -> Image.Image | None:
    """What the model sees, with a mark at the pixel."""
    if image is None:
        return None
    at = with_point(viewer, text)
    shown, (x, y) = at.shown(image).copy(), parse_point(viewer, text)
    height, width = viewer.loaded.size
    centre_x, centre_y = (x + 0.5) * shown.width / width, (y + 0.5) * shown.height / height
    draw = ImageDraw.Draw(shown)
    for radius, colour in ((MARK + 1, "black"), (MARK, "white")):
        box = (centre_x - radius, centre_y - radius, centre_x + radius, centre_y + radius)
        draw.ellipse(box, outline=colour, width=2)
    return shown


def clicked(viewer: Viewer, image: Path | None, place: tuple[float, float]) -> str:
    """The pixel under a place of `marked`, as text."""
    if image is None:
        return FIRST_POINT
    shown = with_point(viewer, FIRST_POINT).shown(image)
    height, width = viewer.loaded.size
    x = min(int(place[0] * width / shown.width), width - 1)
    y = min(int(place[1] * height / shown.height), height - 1)
    return f"{x}, {y}"
