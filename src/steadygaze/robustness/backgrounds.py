"""Object and background apart, and mixed, after ImageNet-9 (docs/equations.md#background-gap).

K. Xiao, L. Engstrom, A. Ilyas, A. Madry: Noise or Signal: The Role of Image Backgrounds in Object
Recognition, ICLR 2021, arXiv:2006.09994. Names as there:

| name | image |
| --- | --- |
| only_fg | the object on black |
| only_bg_t | the object's box filled with tiles of the largest strip of the image beside it |
| mixed_same | the object on the only_bg_t of another image of its class |
| mixed_other | the same, of another class; the paper's mixed_rand draws from every class, its own too |

    gap     = accuracy(mixed_same) − accuracy(mixed_other)
    follows = share of predictions on mixed_other that are the class of the background
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from steadygaze.errors import InputError
from steadygaze.robustness.synthetic import remove_background, swap_background

Pixels = UInt8[np.ndarray, "_ _ 3"]
GRAY = 128


def only_object(image: Pixels, mask: np.ndarray) -> Pixels:
    """Return the object on black.

    Examples:
        >>> image, mask = np.full((4, 4, 3), 200, np.uint8), np.zeros((4, 4), np.uint8)
        >>> mask[1:3, 1:3] = 255
        >>> only_object(image, mask)[:2, 0, 0].tolist(), only_object(image, mask)[1, 1, 0].item()
        ([0, 0], 200)
    """
    return remove_background(image, mask, color=(0, 0, 0))


def only_background(image: Pixels, mask: np.ndarray) -> Pixels:
    """Return the image with the bounding box of its object filled with tiles of the largest strip beside it.

    An object whose box is the whole image leaves no strip: the result is the mean color of the background.

    Args:
        image: (H, W, 3).
        mask: (H, W); 255 or 1 object, 128 border, which is filled too, 0 background.

    Examples:
        >>> image = np.arange(4, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(3, 2)
        >>> mask = np.zeros((4, 4))
        >>> mask[1:3, 1:3] = 255
        >>> only_background(image, mask)[:, 1, 0].tolist()  # the strip above, the first of the largest
        [0, 0, 0, 3]
    """
    inside = _inside(image, mask)
    top, bottom, left, right = _box(inside)
    strips = (image[:top], image[bottom:], image[:, :left], image[:, right:])
    strip = max(strips, key=lambda part: part.shape[0] * part.shape[1])
    if not strip.size:
        outside = image[~inside]
        color = outside.mean(0).round() if len(outside) else GRAY
        return np.full_like(image, color)
    filled = image.copy()
    rows = np.arange(bottom - top) % strip.shape[0]
    columns = np.arange(right - left) % strip.shape[1]
    filled[top:bottom, left:right] = strip[rows][:, columns]
    return filled


def background_share(mask: np.ndarray) -> float:
    """Return the share of the image that the largest strip beside the object's box covers."""
    inside = np.asarray(mask) > 0
    if not inside.any():
        return 1.0
    height, width = inside.shape
    top, bottom, left, right = _box(inside)
    return max(top / height, 1 - bottom / height, left / width, 1 - right / width)


def mix(image: Pixels, mask: np.ndarray, other: Pixels, other_mask: np.ndarray) -> Pixels:
    """Return the object of an image on the background of another, without that one's object."""
    return swap_background(image, mask, only_background(other, other_mask))


def background_gap(same: Any, other: Any) -> float:
    """Return the accuracy on backgrounds of the same class minus that on backgrounds of another.

    Args:
        same (array of bool): (N,), correct or not on mixed_same.
        other (array of bool): (M,), correct or not on mixed_other.

    Examples:
        >>> background_gap([1, 1, 1, 0], [1, 0, 1, 0])
        0.25
    """
    means = [np.asarray(values, dtype=np.float64).mean() for values in (same, other)]
    return float(means[0] - means[1])


def _inside(image: Any, mask: Any) -> Bool[np.ndarray, "h w"]:
    inside = np.asarray(mask) > 0
    if inside.shape != image.shape[:2]:
        raise InputError(f"mask: expected one value for each pixel, {image.shape[:2]}, got {inside.shape}")
    if not inside.any():
        raise InputError("mask: no pixel is marked as object; leave such an image out")
    return inside


def _box(inside: Bool[np.ndarray, "h w"]) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
