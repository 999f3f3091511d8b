"""From numbers to images: color ramps, overlays and comparison grids, with numpy and PIL only.

Evidence for a class is warm (plum, red, orange, pale yellow), evidence against it is cool (navy, blue, pale
mint). Both ramps are straight lines between a few anchors of OKLab (Ottosson 2020), whose distances follow
the eye's, with lightness rising evenly, so equal steps of score look like equal steps of color, also in
gray print. Color grows from transparent: where there is no evidence, the image itself is seen, a little
muted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from steadygaze.errors import InputError

WARM = ("#2b0a4a", "#8c1d5f", "#dd4040", "#fb9a2c", "#fdf3a6")
COOL = ("#0a1f4d", "#1c4fa0", "#2f8fc9", "#6fcbd3", "#dcf7e3")
_TO_LMS = np.array([[0.4122214708, 0.5363325363, 0.0514459929],
                    [0.2119034982, 0.6806995451, 0.1073969566],
                    [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
_TO_LAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468],
                    [1.9779984951, -2.4285922050, 0.4505937099],
                    [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip


def _oklab(color: str) -> Float[np.ndarray, "3"]:
    """OKLab of an sRGB color written as #rrggbb."""
    srgb = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return _TO_LAB @ np.cbrt(_TO_LMS @ linear)


@lru_cache
def ramp(anchors: tuple[str, ...]) -> Float[np.ndarray, "256 3"]:
    """256 sRGB colors in [0, 1] through the anchors, evenly spaced in lightness."""
    points = np.stack([_oklab(anchor) for anchor in anchors])
    lightness = np.linspace(points[0, 0], points[-1, 0], 256)
    path = np.stack([np.interp(lightness, points[:, 0], points[:, axis]) for axis in range(3)], axis=-1)
    linear = (np.linalg.inv(_TO_LMS) @ (np.linalg.inv(_TO_LAB) @ path.T) ** 3).T.clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def to_pil_image(image: Any) -> Image.Image:
    """An RGB image of unchanged size.

    Args:
        image: PIL, a uint8 array (H, W, 3) or (H, W), or a float tensor or array (3, H, W) in [0, 1].
    """
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    is_float_tensor = hasattr(image, "detach") and image.is_floating_point()
    array = np.asarray(image.detach().cpu().float() if is_float_tensor else image)
    if array.dtype == np.uint8:
        if array.ndim == 3 and array.shape[0] == 3 != array.shape[2]:
            array = array.transpose(1, 2, 0)
        if array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3):
            return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")
    elif array.ndim == 3 and array.shape[0] == 3 and np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < -1e-3 or array.max() > 1 + 1e-3:
            raise InputError(
                f"a float image must lie in [0, 1], got [{array.min():.2f}, {array.max():.2f}]. Give the "
                "image before the model's normalization, or undo that (image * std + mean)."
            )
        return Image.fromarray((array.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0))
    raise InputError(
        f"expected one PIL image, a uint8 array (H, W, 3) or a float tensor (3, H, W) in [0, 1], got "
        f"{type(image).__name__} of shape {tuple(array.shape)} and type {array.dtype}. For a batch, give "
        f"images[i]."
    )


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """A small image enlarged by a whole factor until its longer side has at least `side` pixels, no blur."""
    factor = max(1, math.ceil(side / max(image.size)))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def robust_scale(values: np.ndarray, percentile: float = 99.0) -> float:
    """The percentile of the magnitudes, rounded down to a patch, so that one outlier never sets the scale.

    The largest magnitude if that percentile is zero; zero for an empty map.
    """
    magnitudes = np.abs(values).ravel()
    scale = np.percentile(magnitudes, percentile, method="lower") if magnitudes.size else 0.0
    return float(scale if scale > 0 else magnitudes.max(initial=0.0))


def paint(
    values: Float[np.ndarray, "h w"],
    image: Image.Image | None,
    *,
    signed: bool = False,
    opacity: float = 0.78,
) -> Image.Image:
    """Color values in [-1, 1] over an image of the same size, or over black without one.

    Negative values stay uncolored unless `signed`.
    """
    strength = np.abs(values).clip(0, 1) if signed else values.clip(0, 1)
    place = (strength * 255).round().astype(np.uint8)
    colors = np.where((values < 0)[..., None], ramp(COOL)[place], ramp(WARM)[place])
    if image is None:
        # bare: the ramp itself, faded to black below its darkest color
        return _to_image(colors * np.minimum(1, strength / 0.15)[..., None])
    below = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    gray = (below @ np.array([0.2126, 0.7152, 0.0722]))[..., None]
    below = (0.55 * below + 0.45 * gray) * 0.88
    alpha = (opacity * _smooth(strength / 0.75))[..., None]
    return _to_image((1 - alpha) * below + alpha * colors)


def _smooth(x: np.ndarray) -> np.ndarray:
    """Smooth step from 0 to 1."""
    x = x.clip(0, 1)
    return x * x * (3 - 2 * x)


def _to_image(array: np.ndarray) -> Image.Image:
    pixels: UInt8[np.ndarray, "h w 3"] = (array.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(pixels)


@dataclass(frozen=True)
class Row:
    """One row of a comparison grid: images from left to right, a title, and a note in gray beside it.

    Attributes:
        below: An image under each of the images, in its own size; None for none.
    """

    images: Sequence[Image.Image]
    title: str = ""
    note: str = ""
    below: Sequence[Image.Image | None] = ()

    @property
    def height_below(self) -> int:
        """Pixels of the highest image under the images."""
        return max((image.height for image in self.below if image is not None), default=0)


INK, QUIET, PAPER = "#1b1b1f", "#74747c", "#ffffff"


def tile(
    rows: Sequence[Row], headings: Sequence[str], *, cell: int = 224, legend: str = "", noun: str = "class"
) -> Image.Image:
    """A grid with a heading over each column and a title above each row; cells are `cell` pixels wide.

    Args:
        legend: "", "positive", "signed" or "attention": a labeled color bar; a narrow grid has a shorter bar
            and fewer words.
        noun: What the evidence is for; "" if the maps are evidence for nothing.
    """
    if not rows or any(len(row.images) != len(headings) for row in rows):
        raise InputError(
            f"expected at least one row with {len(headings)} images each, one below each heading, "
            f"got {[len(row.images) for row in rows]}"
        )
    gap, margin = max(4, cell // 28), max(10, cell // 10)
    large, small = load_font(max(11, cell // 12)), load_font(max(10, cell // 14))
    line = max(14, cell // 9)
    captions = [_fit(heading, large, cell) for heading in headings]
    top = margin + line * max(len(caption) for caption in captions) + gap
    titled = any(row.title or row.note for row in rows)
    pitch = cell + (line + gap if titled else 0) + 2 * gap
    heights = [pitch + (row.height_below + 2 * gap if row.below else 0) for row in rows]
    bottom = line + 2 * gap if legend else 0
    width = 2 * margin + len(headings) * (cell + gap) - gap
    sheet = Image.new("RGB", (width, top + sum(heights) + bottom + margin - gap), PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, caption in enumerate(captions):
        middle = margin + column * (cell + gap) + cell // 2
        for number, text in enumerate(reversed(caption)):
            pen.text((middle, top - gap - number * line), text, INK, large, anchor="ms")
    for number, row in enumerate(rows):
        above = top + sum(heights[:number])
        if titled:
            title = _cut(row.title, large, width - 2 * margin)
            pen.text((margin, above + line), title, INK, large, anchor="ls")
            indent = margin + pen.textlength(title, large) + (2 * gap if title else 0)
            pen.text(
                (indent, above + line),
                _cut(row.note, small, width - margin - indent),
                QUIET,
                small,
                anchor="ls",
            )
            above += line + gap
        for column, image in enumerate(row.images):
            sheet.paste(_square(image, cell), (margin + column * (cell + gap), above))
        for column, under in enumerate(row.below):
            if under is not None:
                sheet.paste(under, (margin + column * (cell + gap), above + cell + 2 * gap))
    if legend:
        box = margin, top + sum(heights), width - margin
        _draw_legend(sheet, legend, noun, box, length=cell, font=small)
    return sheet


LEGEND_GAP = 9  # pixels between the color bar and a word


def legend_words(kind: str, noun: str) -> tuple[tuple[str, str], ...]:
    """The words at both ends of a color bar, from the longest to none."""
    if kind == "attention":
        return ("least attention", "most attention"), ("", "attention"), ("", "")
    if kind == "signed":
        if not noun:
            return ("negative", "positive"), ("", "")
        return (f"against the {noun}", f"for the {noun}"), ("against", "for"), ("", "")
    if not noun:
        return ("lowest", "highest"), ("", "")
    return ("least evidence", f"most evidence for the {noun}"), ("least", "most"), ("", "")


def legend_bar(kind: str, size: tuple[int, int]) -> Image.Image:
    """The color bar of "positive", "signed" or "attention" maps, from the lowest score to the highest."""
    length, height = size
    values = np.broadcast_to(np.linspace(-1.0 if kind == "signed" else 0.0, 1.0, length), (height, length))
    return paint(values, Image.new("RGB", size, "#dedee2"), signed=True, opacity=1.0)


def _draw_legend(
    sheet: Image.Image, kind: str, noun: str, box: tuple[int, int, int], *, length: int, font: Any
) -> None:
    """A color bar of at most this length with the longest words that fit; box: left, top and right limit."""
    left, top, right = box
    for lowest, highest in legend_words(kind, noun):
        words = [math.ceil(font.getlength(word)) for word in (lowest, highest)]
        room = right - left - sum(width + LEGEND_GAP for width in words if width)
        if room >= length // 2:
            break
    height, length = max(6, length // 24), min(length, room)
    bar = legend_bar(kind, (length, height))
    pen = ImageDraw.Draw(sheet)
    end = right - (words[1] + LEGEND_GAP if highest else 0)
    pen.text((right, top + height), highest, QUIET, font, anchor="rs")
    sheet.paste(bar, (end - length, top))
    pen.text((end - length - LEGEND_GAP, top + height), lowest, QUIET, font, anchor="rs")


def _square(image: Image.Image, cell: int) -> Image.Image:
    """The whole image, fitted into a white square cell; small images are enlarged without blur."""
    scale = cell / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    grown = image.resize(size, Image.Resampling.NEAREST if scale >= 4 else Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", (cell, cell), PAPER)
    canvas.paste(grown, ((cell - size[0]) // 2, (cell - size[1]) // 2))
    return canvas


def load_font(size: int) -> Any:
    """The font of every figure."""
    return ImageFont.load_default(size)


def wrap_text(text: str, font: Any, width: float) -> list[str]:
    """The text in lines of at most this width, broken between words, not before %; a longer word is cut."""
    lines: list[str] = []
    for word in re.split(" (?!%)", text):
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] = f"{lines[-1]} {word}"
        else:
            lines.append(_cut(word, font, width))
    return lines


def _cut(text: str, font: Any, width: float) -> str:
    """The text, shortened with dots until it fits."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def _fit(text: str, font: Any, width: float) -> list[str]:
    """A heading in one line, or in two, the second with the options of a method."""
    if font.getlength(text) <= width or ":" not in text:
        return [_cut(text, font, width)]
    name, options = text.split(":", 1)
    return [_cut(name, font, width), _cut(options.replace(",", ", "), font, width)]
