"""Objects on other backgrounds, pixel by pixel, and the background gap: docs/equations.md#background-gap."""

from collections.abc import Sequence

import numpy as np


def tiled(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The object's box filled with tiles of the largest strip beside it."""
    height, width = mask.shape
    ys = [y for y in range(height) if any(mask[y, x] for x in range(width))]
    xs = [x for x in range(width) if any(mask[y, x] for y in range(height))]
    top, bottom, left, right = ys[0], ys[-1] + 1, xs[0], xs[-1] + 1
    strips = [(0, top, 0, width), (bottom, height, 0, width), (0, height, 0, left), (0, height, right, width)]
    areas = [(b - a) * (d - c) for a, b, c, d in strips]
    a, b, c, d = strips[areas.index(max(areas))]
    filled = image.copy()
    for y in range(top, bottom):
        for x in range(left, right):
            filled[y, x] = image[a + (y - top) % (b - a), c + (x - left) % (d - c)]
    return filled


def mixed(image: np.ndarray, mask: np.ndarray, other: np.ndarray, other_mask: np.ndarray) -> np.ndarray:
    """The object on the background of another image of the same size; masks of 0 and 255."""
    behind = tiled(other, other_mask)
    out = behind.copy()
    for y in range(mask.shape[0]):
        for x in range(mask.shape[1]):
            if mask[y, x] == 255:
                out[y, x] = image[y, x]
    return out


def gap(same: Sequence[bool], other: Sequence[bool]) -> float:
    """Accuracy on backgrounds of the same class minus that on backgrounds of another."""
    return sum(same) / len(same) - sum(other) / len(other)
