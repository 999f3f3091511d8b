"""Images like those of SI-Score, from any images with masks: an object pasted elsewhere, one factor varied.

J. Yung et al., arXiv:2104.04191; numbers as there: the object's bounding box covers `area` of the image,
its center is at (x, y) in 0..1 from the top left, it is turned by `rotation` degrees counterclockwise, then
pasted; what leaves the image is cut off, `inside` is the fraction of the box that is left. Angles end in 1 so
that all are resampled in the same way.

| factor | varied | held |
| --- | --- | --- |
| location | 5 x 5 centers, 0.1 .. 0.9 | area 0.2, upright |
| rotation | 1, 21, .. 341 degrees | area 0.2, in the middle |
| size | areas 0.05 .. 1 | upright, in the middle |

And `swap_background` puts the object, where it is, before another background; `remove_background` before a
plain color. Masks: 255 (or 1, True) object, 0 background, 128 a border that may be either: it fades out from
the object to the background. Same inputs and seed: same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from steadygaze.errors import InputError, UnknownNameError

Pixels = UInt8[np.ndarray, "_ _ 3"]
POSITIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
FACTORS: dict[str, tuple[Any, ...]] = {
    "location": tuple((x, y) for y in POSITIONS for x in POSITIONS),
    "rotation": tuple(range(1, 360, 20)),
    "size": (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
}
AREA = 0.2


@dataclass(frozen=True, eq=False)
class Synthetic:
    """A composed image (S, S, 3) and its settings; background: index of the background that was drawn."""

    pixels: Pixels
    factor: str
    x: float
    y: float
    area: float
    rotation: float
    background: int
    inside: float

    @property
    def value(self) -> Any:
        """The value of the factor."""
        return {"location": (self.x, self.y), "rotation": self.rotation, "size": self.area}[self.factor]


def cut_out(image: Pixels, mask: np.ndarray) -> UInt8[np.ndarray, "_ _ 4"]:
    """The object with its transparency, cropped to its bounding box."""
    alpha = _alpha(image, mask)
    rows, columns = (np.flatnonzero(alpha.any(axis)) for axis in (1, 0))
    box = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    return np.dstack([image[box], alpha[box]])


def place(
    cut: UInt8[np.ndarray, "h w 4"],
    background: Pixels,
    *,
    x: float = 0.5,
    y: float = 0.5,
    area: float = AREA,
    rotation: float = 0.0,
) -> tuple[Pixels, float]:
    """The object on a background: the image, and the share of the object's box that is inside it."""
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise InputError(f"x, y: expected the center of the object in 0..1, got {x}, {y}")
    if not 0 < area <= 4:
        raise InputError(f"area: expected the share of the image that the object's box covers, got {area}")
    height, width = background.shape[:2]
    scale = (area * height * width / (cut.shape[0] * cut.shape[1])) ** 0.5
    size = (max(1, round(cut.shape[1] * scale)), max(1, round(cut.shape[0] * scale)))
    thing = Image.fromarray(cut).resize(size, Image.Resampling.BILINEAR)
    if rotation % 360:
        thing = thing.rotate(rotation, Image.Resampling.BICUBIC, expand=True)
    left, top = round(x * width - thing.width / 2), round(y * height - thing.height / 2)
    composed = Image.fromarray(background)
    composed.paste(thing, (left, top), thing)
    seen = [
        max(0, min(at + long, side) - max(at, 0))
        for at, long, side in ((left, thing.width, width), (top, thing.height, height))
    ]
    return np.array(composed), seen[0] * seen[1] / (thing.width * thing.height)


def vary(
    image: Pixels,
    mask: np.ndarray,
    backgrounds: Sequence[Pixels],
    factor: str,
    *,
    seed: int,
    index: int = 0,
    values: Sequence[Any] | None = None,
    side: int = 224,
    area: float = AREA,
) -> list[Synthetic]:
    """One image for each value of the factor, all of one object on one background.

    The background is drawn by (seed, index, factor).

    Args:
        values: Centers (x, y), degrees or areas instead of those of the table.
        index: The image's place in its data set.

    Examples:
        >>> image, mask = np.full((8, 8, 3), 200, np.uint8), np.zeros((8, 8), np.uint8)
        >>> mask[2:6, 2:6] = 255
        >>> background = np.zeros((32, 32, 3), np.uint8)
        >>> composed = vary(image, mask, [background], "size", seed=0, values=[0.1, 0.5], side=32)
        >>> [item.pixels.shape for item in composed]
        [(32, 32, 3), (32, 32, 3)]
    """
    if factor not in FACTORS:
        raise UnknownNameError("factor", str(factor), FACTORS)
    if not len(backgrounds):
        raise InputError("backgrounds: expected at least one image (H, W, 3), got none")
    cut = cut_out(image, mask)
    from steadygaze.robustness.corruptions.corrupt import generator  # which imports torch

    chosen = int(generator(seed, index, factor, 0).integers(len(backgrounds)))
    behind = square(backgrounds[chosen], side)
    out = []
    for value in FACTORS[factor] if values is None else values:
        setting: dict[str, float] = {"x": 0.5, "y": 0.5, "area": area, "rotation": 0.0}
        if factor == "location":
            setting |= dict(zip("xy", value, strict=True))
        else:
            setting["rotation" if factor == "rotation" else "area"] = float(value)
        pixels, inside = place(cut, behind, **setting)
        out.append(Synthetic(pixels, factor, background=chosen, inside=inside, **setting))
    return out


def swap_background(image: Pixels, mask: np.ndarray, background: Pixels) -> Pixels:
    """The object on another background, in its original position.

    The background is cropped to the image's shape and resized.

    Examples:
        >>> image, mask = np.full((8, 8, 3), 200, np.uint8), np.zeros((8, 8), np.uint8)
        >>> mask[2:6, 2:6] = 255
        >>> swap_background(image, mask, np.zeros((16, 16, 3), np.uint8))[0, 0].tolist()
        [0, 0, 0]
    """
    height, width = _checked(image).shape[:2]
    return _blend(image, _alpha(image, mask), _fitted(background, height, width))


def remove_background(image: Pixels, mask: np.ndarray, *, color: Sequence[int] = (128, 128, 128)) -> Pixels:
    """The object on a plain color, in its original position.

    Examples:
        >>> image, mask = np.full((8, 8, 3), 200, np.uint8), np.zeros((8, 8), np.uint8)
        >>> mask[2:6, 2:6] = 255
        >>> remove_background(image, mask)[0, 0].tolist()
        [128, 128, 128]
    """
    if len(color) != 3 or any(not 0 <= c <= 255 for c in color):
        raise InputError(f"color: expected three numbers of 0..255, got {list(color)}")
    plain = np.broadcast_to(np.array(color, dtype=np.uint8), _checked(image).shape)
    return _blend(image, _alpha(image, mask), plain)


def square(image: Pixels, side: int) -> Pixels:
    """The middle square of an image, resized to `side`."""
    return _fitted(image, side, side)


def _fitted(image: Pixels, height: int, width: int) -> Pixels:
    """The largest middle part of the wanted shape, resized."""
    have_height, have_width = _checked(image).shape[:2]
    scale = min(have_height / height, have_width / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (have_height - rows) // 2, (have_width - columns) // 2
    part = Image.fromarray(np.ascontiguousarray(image[top : top + rows, left : left + columns]))
    return np.array(part.resize((width, height), Image.Resampling.BILINEAR))


def _blend(image: Pixels, alpha: UInt8[np.ndarray, "h w"], behind: Pixels) -> Pixels:
    a = alpha[..., None].astype(np.float64) / 255
    return (a * image + (1 - a) * behind).round().astype(np.uint8)


def _checked(image: Any) -> Pixels:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise InputError(
            f"expected a uint8 array (H, W, 3), such as np.asarray(image.convert('RGB')), got {type(image)}"
        )
    return image


def _alpha(image: Any, mask: Any) -> UInt8[np.ndarray, "h w"]:
    """Opacity: 255 on the object, 0 on the background, falling evenly across the border between them."""
    image, mask = _checked(image), np.asarray(mask)
    if mask.shape != image.shape[:2]:
        raise InputError(f"mask: expected one value for each pixel, {image.shape[:2]}, got {mask.shape}")
    values = set(np.unique(mask).tolist())
    if values <= {0, 1}:
        alpha = np.where(mask, 255, 0)
    elif values <= {0, 128, 255}:
        alpha = mask
    else:
        raise InputError(f"mask: expected 255, 128 and 0, or 1 and 0, got {sorted(values)[:8]}")
    if not (alpha == 255).any():
        raise InputError("mask: no pixel is marked as object; leave such an image out")
    border = alpha == 128
    if not border.any():
        return alpha.astype(np.uint8)
    inner, outer = _steps(alpha == 255, border), _steps(alpha == 0, border)
    with np.errstate(invalid="ignore"):
        # where no background is near, all is object
        fading = np.where(np.isinf(outer), 1.0, outer / (inner + outer))
    return np.where(border, (255 * fading).round(), alpha).astype(np.uint8)


def _steps(start: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Number of steps to one of four neighbors from `start` to each pixel, inside `within`; or infinity."""
    steps = np.where(start, 0.0, np.inf)
    front = start
    while front.any():
        near = np.zeros_like(front)
        near[1:] |= front[:-1]
        near[:-1] |= front[1:]
        near[:, 1:] |= front[:, :-1]
        near[:, :-1] |= front[:, 1:]
        front = near & within & np.isinf(steps)
        steps[front] = steps.max(where=np.isfinite(steps), initial=0) + 1
    return steps
