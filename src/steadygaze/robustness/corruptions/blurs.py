"""Corruptions that move or smear pixels: defocus, glass, motion, zoom, Gaussian blur, elastic transform.

Each function takes a uint8 image (H, W, 3), its settings for one severity, and a random generator, and
gives uint8.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from steadygaze.robustness.corruptions.filters import (
    add_shifted,
    gaussian,
    gaussian_weights,
    motion,
    sample,
    to_bytes,
    to_float,
    zoom,
)

Rng = np.random.Generator


def gaussian_blur(image: np.ndarray, sigma: float, rng: Rng) -> np.ndarray:
    return to_bytes(gaussian(to_float(image), sigma).add_(1e-3))


def motion_blur(image: np.ndarray, radius: int, sigma: float, rng: Rng) -> np.ndarray:
    """Smear along an angle drawn from -45..45 degrees."""
    return to_bytes(motion(to_float(image), radius, sigma, rng.uniform(-45, 45)))


@lru_cache(maxsize=32)
def _disk(
    radius: float, sigma: float
) -> tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int, float], ...], int]:
    """Disk of `radius` (whole pixels whose center is inside), smoothed by a small Gaussian, window 17 x 17 or
    more.

    A smoothed disk is columns of ones (their sums are differences of running sums) after a Gaussian of 3 or 5
    taps; where the window cuts the Gaussian off, and mirrors it back, a few taps correct the rest. -> half
    window, ((x, half height of the column), ...), (y, x, weight) to correct, number of pixels in the disk.
    """
    half, taps = (8, 3) if radius <= 8 else (math.ceil(radius), 5)
    axis = np.arange(-half, half + 1)
    inside = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float64)
    columns = tuple((int(x), int(inside[:, k].sum()) // 2) for k, x in enumerate(axis) if inside[:, k].any())
    small = np.array(gaussian_weights(sigma, (taps // 2) / sigma))
    spare = np.pad(inside, taps // 2)
    open_, folded = spare, np.pad(inside, taps // 2, mode="reflect")
    for move in (lambda a: a, np.transpose):
        open_ = move(np.apply_along_axis(np.convolve, 0, move(open_), small, "same"))
        folded = move(np.apply_along_axis(np.convolve, 0, move(folded), small, "same"))
    edge = taps // 2
    wanted = np.zeros_like(open_)
    wanted[edge:-edge, edge:-edge] = folded[edge:-edge, edge:-edge]
    gap = wanted - open_
    where = np.argwhere(np.abs(gap) > 1e-3)
    return half, columns, tuple((int(y), int(x), float(gap[y, x])) for y, x in where), int(inside.sum())


def _mirror(image: np.ndarray, margin: int) -> np.ndarray:
    """Grown by `margin`, mirrored about the border pixels' centers, however small the image."""
    return np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="reflect")


def defocus_blur(image: np.ndarray, radius: float, sigma: float, rng: Rng) -> np.ndarray:
    """Convolution with a disk."""
    half, columns, correction, pixels = _disk(radius, sigma)
    height, width = image.shape[:2]
    edge = 1 if radius <= 8 else 2
    reach = max(x for x, _ in columns)
    margin = half + edge
    padded = to_float(_mirror(image, margin))
    small = gaussian_weights(sigma, edge / sigma)
    inner = padded[
        margin - reach - edge : margin + reach + edge + height,
        margin - reach - edge : margin + reach + edge + width,
    ]
    rows, cols = height + 2 * reach, width + 2 * reach
    smooth = add_shifted(inner, [(k, 0, w) for k, w in enumerate(small)], rows, cols + 2 * edge)
    smooth = add_shifted(smooth, [(0, k, w) for k, w in enumerate(small)], rows, cols)
    running = torch.cat((smooth.new_zeros(1, cols, 3), smooth.cumsum(0)))
    taps = []
    for x, tall in columns:
        taps += [(reach + tall + 1, reach + x, 1.0), (reach - tall, reach + x, -1.0)]
    total = add_shifted(running, taps, height, width)
    if correction:
        total += add_shifted(padded, correction, height, width)
    return to_bytes(total.div_(pixels).add_(1e-3))


def _shuffle(shape: tuple[int, int], reach: int, times: int, rng: Rng) -> np.ndarray:
    """Where each pixel's color comes from, (H * W,).

    From the last pixel to the first, each takes the color of a neighbor at -reach..reach - 1. The published
    code means to swap the two, but its assignment of views copies. A neighbor that was visited before has a
    color taken from elsewhere, so links are followed while they lead forward.
    """
    height, width = shape
    inner = (slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1))
    index = np.arange(height * width).reshape(shape)
    visited = np.zeros(shape, dtype=bool)
    visited[inner] = True
    source: np.ndarray = index.ravel()
    for _ in range(times):
        step = rng.integers(-reach, reach, size=(2, *index[inner].shape), dtype=np.int8).astype(np.intp)
        grid = index.copy()
        grid[inner] += step[0] * width + step[1]
        link = grid.ravel()
        last = np.where((link > index.ravel()) & visited.ravel().take(link), link, index.ravel())
        while not np.array_equal(further := last.take(last), last):  # doubles what is followed each time
            last = further
        source = source.take(link.take(last))
    return source


def glass_blur(image: np.ndarray, sigma: float, reach: int, times: int, rng: Rng) -> np.ndarray:
    """Gaussian blur, neighbors shuffled, Gaussian blur."""
    height, width = image.shape[:2]
    soft = to_bytes(gaussian(to_float(image), sigma))
    mixed = (
        soft.reshape(-1, 3).take(_shuffle((height, width), reach, times, rng), axis=0).reshape(image.shape)
    )
    return to_bytes(gaussian(to_float(mixed), sigma).add_(1e-3))


def zoom_blur(image: np.ndarray, start: float, stop: float, step: float, rng: Rng) -> np.ndarray:
    """Mean of the image (twice) and its enlargements by arange(start, stop, step)."""
    x = to_float(image)
    factors = np.arange(start, stop, step)
    total = (x * 2).transpose(0, 1).contiguous().transpose(0, 1)  # in memory as `zoom` gives it
    for factor in factors[1:]:
        total += zoom(x, float(factor))
    return to_bytes(total.div_(len(factors) + 1).add_(1e-3).contiguous())


def _noise_field(
    shape: tuple[int, int], sigma: float | tuple[float, float], reach: float, rng: Rng
) -> Tensor:
    """Two smooth random fields (H, W, 2) in pixels: uniform noise in -reach..reach, blurred."""
    noise = torch.from_numpy(rng.random((*shape, 2), dtype=np.float32)).mul_(2 * reach).sub_(reach)
    return gaussian(noise, sigma, truncate=3.0, border="reflect")


def _displaced(x: Tensor, field: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], dtype=torch.float32)[:, None] + field[..., 1]
    columns = torch.arange(x.shape[1], dtype=torch.float32) + field[..., 0]
    return sample(x, rows, columns)


def elastic_affine(image: np.ndarray, alpha: float, sigma: float, corner: float, rng: Rng) -> np.ndarray:
    """A random affine map of three corners, then a smooth random displacement; all lengths in image widths.

    The definition of Hendrycks & Dietterich for ImageNet-C and CIFAR-10-C.
    """
    height, width = image.shape[:2]
    size = min(height, width)
    center, reach = np.array([height // 2, width // 2], dtype=np.float64), size // 3
    old = np.array([center + reach, [center[0] + reach, center[1] - reach], center - reach])
    new = old + rng.uniform(-corner * size, corner * size, size=(3, 2))
    matrix = np.linalg.solve(np.column_stack((new, np.ones(3))), old)  # new (x, y, 1) -> old (x, y)
    y, x = np.mgrid[:height, :width]
    back = np.stack((x, y, np.ones_like(x)), axis=-1) @ matrix
    zoomed = sample(
        to_float(image),
        torch.from_numpy(back[..., 1]).float(),
        torch.from_numpy(back[..., 0]).float(),
        whole=True,
    )
    return to_bytes(
        _displaced(zoomed, _noise_field((height, width), sigma * size, alpha * size, rng)).add_(1e-3)
    )
