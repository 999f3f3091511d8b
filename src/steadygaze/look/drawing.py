"""Maps and marks over images, for what is looked at rather than explained; and checks of layers and heads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.files import FIGURE_FORMATS, make_parent, write_figure, write_npz
from steadygaze.results.attribution import resized
from steadygaze.results.drawing import INK, PAPER, QUIET, paint, robust_scale


def write_result(
    path: str | Path,
    figure: Callable[[], Image.Image],
    numbers: Callable[[], Mapping[str, Any]] | None = None,
) -> Path:
    """Write a figure or numbers (.npz), by the suffix of the path; returns the path."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in FIGURE_FORMATS:
        return write_figure(path, figure())
    if suffix == ".npz" and numbers is not None:
        make_parent(path)
        return write_npz(path, numbers())
    known = [*FIGURE_FORMATS, *([] if numbers is None else [".npz"])]
    raise InputError(f"expected a file with one of the suffixes {', '.join(known)}, got {path}")


def cell_image(
    images: Sequence[Image.Image] | None,
    number: int,
    grid: tuple[int, int],
    cell: int,
    *,
    mark: tuple[int, int] | None = None,
) -> Image.Image:
    """One image at the width of a cell, gray where it is not known, with a frame around one patch."""
    if images is None:
        drawn = Image.new("RGB", (cell, max(1, cell * grid[0] // grid[1])), "#dedee2")
    else:
        image = images[number]
        height = max(1, round(image.height * cell / image.width))
        enlarge = cell >= 4 * image.width
        how = Image.Resampling.NEAREST if enlarge else Image.Resampling.LANCZOS
        drawn = image.convert("RGB").resize((cell, height), how)
    if mark is not None:
        draw_frame(drawn, grid, (mark[0] % grid[0], mark[1] % grid[1]))
    return drawn


def draw_frame(image: Image.Image, grid: tuple[int, int], patch: tuple[int, int]) -> None:
    """Draw a frame around one patch, white inside black, so that it is seen on every image."""
    down, across = image.height / grid[0], image.width / grid[1]
    left, top = round(patch[1] * across), round(patch[0] * down)
    right = max(left + 2, round((patch[1] + 1) * across) - 1)
    bottom = max(top + 2, round((patch[0] + 1) * down) - 1)
    width = max(1, image.width // 150)
    pen = ImageDraw.Draw(image)
    pen.rectangle([left - width, top - width, right + width, bottom + width], None, "#000000", width)
    pen.rectangle([left, top, right, bottom], None, "#ffffff", width)


def overlay(
    values: Float[Tensor, "h w"], image: Image.Image, *, full: float | None = None, signed: bool = False
) -> Image.Image:
    """A map drawn over an image, from transparent at 0 to the full color.

    Args:
        full: The value with the full color; by default the 99th percentile of the map's magnitudes.
    """
    scores = values.detach().to("cpu", torch.float64)
    scores = scores if signed else scores.clamp(min=0)
    scores = (scores / (full or robust_scale(scores.numpy()) or 1.0)).clamp(-1, 1)
    shown = resized(scores, (image.height, image.width), "bicubic").clamp(-1, 1).numpy()
    return paint(shown, image, signed=signed)


def matrix(
    values: Float[Tensor, "rows columns"], headings: Sequence[str], *, title: str, cell: int
) -> Image.Image:
    """Signed numbers as colored squares, a row for each layer, warm above zero and cool below.

    The largest magnitude has the full color.
    """
    numbers = values.detach().to("cpu", torch.float64)
    scaled = numbers / (numbers.abs().max().clamp_min(torch.finfo(numbers.dtype).tiny))
    rows, columns = scaled.shape
    large = np.kron(scaled.numpy(), np.ones((cell, cell)))
    colored = paint(large, Image.new("RGB", large.shape[::-1], "#dedee2"), signed=True, opacity=1.0)
    font = ImageFont.load_default(max(10, cell // 2))
    left, top, margin = 4 * cell, 3 * cell, cell // 2
    width = max(left + columns * cell + margin, math.ceil(font.getlength(title)) + 2 * margin)
    sheet = Image.new("RGB", (width, top + rows * cell + 2 * cell), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((margin, margin), title, INK, font)
    for column, heading in enumerate(headings):
        pen.text((left + (column + 0.5) * cell, top - margin // 2), heading, QUIET, font, anchor="ms")
    for row in range(rows):
        pen.text((left - margin, top + (row + 0.5) * cell), f"layer {row}", QUIET, font, anchor="rm")
    sheet.paste(colored, (left, top))
    grid_color = PAPER
    for row in range(rows + 1):
        pen.line([left, top + row * cell, left + columns * cell, top + row * cell], grid_color)
    for column in range(columns + 1):
        pen.line([left + column * cell, top, left + column * cell, top + rows * cell], grid_color)
    largest = f"largest magnitude {float(numbers.abs().max()):.2f}"
    pen.text((margin, top + rows * cell + margin), largest, QUIET, font)
    return sheet


def index_range(count: int) -> str:
    """The numbers that count `count` things, in words."""
    return f"0..{count - 1}, or -{count}..-1 from the end"


def checked_index(name: str, value: Any, count: int) -> int:
    """A whole number from -count to count - 1 as one of 0..count - 1; else an error that says what exists."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name}: expected {index_range(count)}, got {value!r}") from None
    if not -count <= number < count:
        raise InputError(f"{name}: expected {index_range(count)}, got {number}")
    return number % count
