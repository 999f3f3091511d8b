"""Maps and marks over images, for what is looked at rather than explained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from steadygaze.results.attribution import resized
from steadygaze.results.drawing import INK, PAPER, QUIET, paint, robust_scale

IMAGE_SUFFIXES = (".png",)
MARK = "#ffffff"  # frame around a query patch, inside a dark one


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
        row, column = mark[0] % grid[0], mark[1] % grid[1]
        high, wide = drawn.height / grid[0], drawn.width / grid[1]
        box = (column * wide, row * high, (column + 1) * wide, (row + 1) * high)
        pen = ImageDraw.Draw(drawn)
        pen.rectangle([box[0] - 2, box[1] - 2, box[2] + 1, box[3] + 1], outline="#1b1b1f", width=2)
        pen.rectangle([box[0], box[1], box[2] - 1, box[3] - 1], outline=MARK, width=2)
    return drawn


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
