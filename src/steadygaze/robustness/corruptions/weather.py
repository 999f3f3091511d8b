"""Corruptions by weather: snow, fog, frost, spatter.

Each function takes a uint8 image (H, W, 3), its settings for one severity, and a random generator, and
gives uint8.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from steadygaze.robustness.corruptions.filters import (
    add_shifted,
    draw_normal,
    gaussian,
    motion,
    to_bytes,
    to_float,
    zoom,
)
from steadygaze.robustness.corruptions.frost import frost_layer

Rng = np.random.Generator
GRAY = (0.299, 0.587, 0.114)  # luma of BT.601
WATER, MUD = (175.0, 238.0, 238.0), (63.0, 42.0, 20.0)


def flakes(shape: tuple[int, int], mean: float, scale: float, size: float, least: float, rng: Rng) -> Tensor:
    """Snow before it falls, (H, W, 1) in whole gray levels 0..255: normal noise, enlarged, what is below
    `least` removed."""
    noise = torch.from_numpy(draw_normal(rng, shape)).mul_(scale).add_(mean)[..., None]
    layer = zoom(noise, size).contiguous()
    return layer.mul_(layer >= least).clamp_(0, 1).mul_(255).floor_()


def fallen(image: np.ndarray, layer: Tensor, keep: float) -> np.ndarray:
    """The image whitened (`keep` of it stays) under a snow layer in 0..255 and the same layer turned by
    180 degrees."""
    x = to_float(image)
    layer = layer.floor()  # ImageMagick cuts off the fraction, as `to_bytes` does
    gray = (x @ x.new_tensor(GRAY)).mul_(1.5).add_(127.5)[..., None]
    white = torch.maximum(x, gray).mul_(1 - keep)
    return to_bytes(x.mul_(keep).add_(white).add_(layer + layer.flip(0, 1)))


def snow(
    image: np.ndarray,
    mean: float,
    scale: float,
    size: float,
    least: float,
    radius: int,
    sigma: float,
    keep: float,
    rng: Rng,
) -> np.ndarray:
    """Flakes smeared along an angle drawn from -135..-45 degrees."""
    layer = flakes((image.shape[0], image.shape[1]), mean, scale, size, least, rng)
    return fallen(image, motion(layer, radius, sigma, rng.uniform(-135, -45)), keep)


def plasma(size: int, decay: float, rng: Rng) -> np.ndarray:
    """Diamond-square height map on a torus, (size, size) float32 in 0..1; `size` is a power of two. At each
    halving the noise falls by decay squared: the published code multiplies its amplitude in twice."""
    field = np.zeros((size, size), dtype=np.float32)
    step, wobble = size, 100.0

    def noisy(total: np.ndarray) -> np.ndarray:
        noise = rng.random(total.shape, dtype=np.float32)
        noise -= np.float32(0.5)
        noise *= np.float32(2 * wobble * wobble)
        noise += total * np.float32(0.25)
        return noise

    while step >= 2:
        half = step // 2
        corner = field[::step, ::step]
        total = corner + np.roll(corner, -1, axis=0)
        center = noisy(total + np.roll(total, -1, axis=1))
        field[half::step, half::step] = center
        across = center + np.roll(center, 1, axis=0) + corner + np.roll(corner, -1, axis=1)
        field[::step, half::step] = noisy(across)
        down = center + np.roll(center, 1, axis=1) + corner + np.roll(corner, -1, axis=0)
        field[half::step, ::step] = noisy(down)
        step, wobble = half, wobble / decay
    field -= field.min()
    field /= field.max()
    return field


def fog(image: np.ndarray, amount: float, decay: float, rng: Rng) -> np.ndarray:
    """Plasma added, then all scaled so that the brightest value stays in range."""
    height, width = image.shape[:2]
    size = 1 << (max(height, width) - 1).bit_length()
    mist = torch.from_numpy(plasma(size, decay, rng)[:height, :width])[..., None]
    brightest = float(image.max()) / 255
    return to_bytes(to_float(image).add_(mist, alpha=255 * amount).mul_(brightest / (brightest + amount)))


def frost(
    image: np.ndarray, keep: float, amount: float, scale: float, count: int, folder: str | None, rng: Rng
) -> np.ndarray:
    """keep * x + amount * a random part of a random frost texture."""
    layer = frost_layer((image.shape[0], image.shape[1]), scale, count, folder, rng)
    return to_bytes(to_float(image).mul_(keep).add_(to_float(layer), alpha=amount))


def _neighbors(x: np.ndarray) -> np.ndarray:
    """(3, 3, H, W) views of a padded array (H + 2, W + 2): [1 + dy, 1 + dx] is the neighbor at (dy, dx)."""
    return np.lib.stride_tricks.sliding_window_view(x, (x.shape[0] - 2, x.shape[1] - 2))


def edges(gray: np.ndarray, low: int, high: int) -> np.ndarray:
    """Canny edges of uint8 (H, W): Sobel, L1 strength, thinning along four directions, strong edges and the
    weak ones that hang on them -> bool (H, W)."""
    near = _neighbors(np.pad(gray, 1, mode="edge").astype(np.int32))
    side_x = near[:, 2] - near[:, 0]
    side_y = near[2] - near[0]
    gx = side_x[0] + 2 * side_x[1] + side_x[2]
    gy = side_y[0] + 2 * side_y[1] + side_y[2]
    ax, ay = np.abs(gx), np.abs(gy)
    strength = ax + ay
    s = _neighbors(np.pad(strength, 1))
    flat, steep = ay < 0.41421356 * ax, ay > 2.41421356 * ax
    same = (gx ^ gy) >= 0
    before = np.where(flat, s[1, 0], np.where(steep, s[0, 1], np.where(same, s[0, 0], s[0, 2])))
    after = np.where(flat, s[1, 2], np.where(steep, s[2, 1], np.where(same, s[2, 2], s[2, 0])))
    ridge = (
        (strength > before) & np.where(flat | steep, strength >= after, strength > after) & (strength > low)
    )
    edges = ridge & (strength > high)
    count = -1
    while count != (count := int(np.count_nonzero(edges))):
        rows = np.pad(edges, 1)
        rows = rows[:, :-2] | rows[:, 1:-1] | rows[:, 2:]
        edges = (rows[:-2] | rows[1:-1] | rows[2:]) & ridge
    return edges


@lru_cache(maxsize=4)
def _chamfer(most: int) -> np.ndarray:
    """Length (most + 1, most + 1) of the shortest way by steps of 1 (side), 1.4 (diagonal) and 2.1969
    (knight's move), at most `most`: OpenCV's approximation of the Euclidean distance with a 5 x 5 mask."""
    a, b = np.indices((most + 1, most + 1))
    long, short = np.maximum(a, b), np.minimum(a, b)
    near_axis = (long - 2 * short) + 2.1969 * short
    near_diagonal = 1.4 * (2 * short - long) + 2.1969 * (long - short)
    return np.minimum(np.where(long >= 2 * short, near_axis, near_diagonal), most).astype(np.float32)


def distance(mask: np.ndarray, most: int) -> np.ndarray:
    """Distance (H, W) of each pixel to the nearest True by `_chamfer`, float32, at most `most`."""
    width, ways = mask.shape[1], _chamfer(most)
    x = np.arange(width, dtype=np.int32)
    left = np.maximum.accumulate(np.where(mask, x, -width - most), axis=1)
    right = np.minimum.accumulate(np.where(mask, x, 2 * width + most)[:, ::-1], axis=1)[:, ::-1]
    along = np.minimum(np.minimum(x - left, right - x), most)  # to the nearest True of the same row
    tall = np.pad(along, ((most, most), (0, 0)), constant_values=most)
    best = ways[0].take(along)
    for k in range(-most, most + 1):
        np.minimum(best, ways[abs(k)].take(tall[most + k : most + k + len(along)]), out=best)
    return best


def _box3(x: Tensor) -> Tensor:
    """Mean of 3 x 3, mirrored about the border pixels' centers."""
    height, width = x.shape
    padded = torch.nn.functional.pad(x[None, None], (1, 1, 1, 1), mode="reflect")[0, 0, ..., None]
    taps = [(y, z, 1.0) for y in range(3) for z in range(3)]
    return add_shifted(padded, taps, height, width)[..., 0].div_(9)  # not 9 ninths: those may fall below 1


def _equalized(gray: np.ndarray) -> np.ndarray:
    """Histogram equalization of uint8."""
    count = np.bincount(gray.ravel(), minlength=256)
    first = int(np.flatnonzero(count)[0])
    if count[first] == gray.size:
        return gray
    spread = np.cumsum(count) - count[first]
    return np.clip(np.rint(spread * (255.0 / (gray.size - count[first]))), 0, 255).astype(np.uint8)[gray]


def water(layer: np.ndarray) -> np.ndarray:
    """Drops lit from one side, (H, W) float32 in 0..1, of a liquid layer in uint8."""
    height, width = layer.shape
    deep = _box3(torch.from_numpy(distance(edges(layer, 50, 150), 20)))
    relief = torch.from_numpy(_equalized(deep.to(torch.uint8).numpy())).float()
    padded = torch.nn.functional.pad(relief[None, None], (1, 1, 1, 1), mode="reflect")[0, 0, ..., None]
    slope = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))
    taps = [(y, x, float(slope[y][x])) for y in range(3) for x in range(3) if slope[y][x]]
    lit = _box3(add_shifted(padded, taps, height, width)[..., 0].clamp_(0, 255)).round_()
    light = lit.numpy() * layer
    top = light.max()
    return light / top if top > 0 else light


def spatter(
    image: np.ndarray,
    mean: float,
    scale: float,
    size: float,
    least: float,
    amount: float,
    mud: bool,
    rng: Rng,
) -> np.ndarray:
    """Drops of water, lit from one side, or of mud."""
    height, width = image.shape[:2]
    noise = torch.from_numpy(draw_normal(rng, (height, width))).mul_(scale).add_(mean)[..., None]
    liquid = gaussian(noise, size)
    x = to_float(image)
    if mud:
        cover = gaussian((liquid > least).float(), amount)
        cover.mul_(cover >= 0.8)
        return to_bytes(x.mul_(1 - cover).add_(cover * x.new_tensor(MUD)))
    layer = liquid.mul_(liquid >= least)[..., 0].mul_(255).to(torch.int32).numpy().astype(np.uint8)
    light = torch.from_numpy(water(layer)).mul_(amount)[..., None]
    return to_bytes(x.add_(light * x.new_tensor(WATER)))
