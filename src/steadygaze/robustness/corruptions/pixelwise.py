"""Corruptions of each pixel alone, of blocks of pixels, or of their coding: noise, color, pixelate, JPEG.

Each function takes a uint8 image (H, W, 3), its settings for one severity, and a random generator, and
gives uint8. A gray level has only 256 values, so whatever depends on one or two of them is a table, made
once.
"""

from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from PIL import Image

from steadygaze.robustness.corruptions.filters import draw16, draw_normal, normal_steps, to_bytes, to_float

Rng = np.random.Generator


def gaussian_noise(image: np.ndarray, scale: float, rng: Rng) -> np.ndarray:
    """x + 255 * scale * N(0, 1)."""
    noisy = normal_steps(255.0 * scale).take(draw16(rng, image.shape))
    noisy += image
    return np.clip(noisy, 0, 255, out=noisy).astype(np.uint8)


def speckle_noise(image: np.ndarray, scale: float, rng: Rng) -> np.ndarray:
    """x + x * scale * N(0, 1)."""
    noise = torch.from_numpy(draw_normal(rng, image.shape))
    return to_bytes(noise.mul_(scale).add_(1).mul_(to_float(image)))


def impulse_noise(image: np.ndarray, amount: float, rng: Rng) -> np.ndarray:
    """A share `amount` of all values becomes 0 or 255, half and half."""
    draw = draw16(rng, image.shape)
    half = round(amount * 0.5 * (1 << 16))
    out = np.where(draw < half, np.uint8(255), image)
    out[draw >= (1 << 16) - half] = 0
    return out


@lru_cache(maxsize=32)
def _poisson_tables(photons: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Alias tables (Walker) for min(Poisson(photons * v / 255), photons): 2**bits columns for each gray level
    v.

    A column keeps its own outcome where the rest of the draw is below `limit`, and gives `other` where not.
    -> bits, limit uint32 (256 * 2**bits,), own and other uint8: the gray level that comes out.
    """
    counts = torch.arange(photons + 1, dtype=torch.float64)
    rate = torch.arange(256, dtype=torch.float64)[:, None] * photons / 255
    mass = torch.exp(torch.special.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).numpy()
    mass[:, -1] = 1 - mass[:, :-1].sum(1)  # more photons than white are white
    gray, group = np.unique((np.arange(photons + 1) / photons * 255).astype(np.uint8), return_inverse=True)
    bits = (len(gray) - 1).bit_length()
    columns = 1 << bits
    rest = np.zeros((256, columns))  # what each outcome still has to give, in columns
    np.add.at(rest.T, group, np.maximum(mass, 0).T * columns)
    limit, other = np.ones((256, columns)), np.tile(np.arange(columns), (256, 1))
    rows, done = np.arange(256), np.zeros((256, columns))
    for _ in range(columns - 1):  # the richest outcome fills up the poorest column, which is then closed
        poor, rich = (rest + done).argmin(1), (rest - done).argmax(1)
        limit[rows, poor], other[rows, poor] = rest[rows, poor], rich
        rest[rows, rich] -= 1 - rest[rows, poor]
        done[rows, poor] = np.inf
    gray = np.pad(gray, (0, columns - len(gray)))
    scaled = np.clip(np.round(limit * (1 << (32 - bits))), 0, 2**32 - 1).astype(np.uint32)
    return bits, scaled.ravel(), np.tile(gray, 256), gray[other].ravel()


def shot_noise(image: np.ndarray, photons: int, rng: Rng) -> np.ndarray:
    """Poisson(x * photons) / photons, for x in 0..1."""
    bits, limit, own, other = _poisson_tables(photons)
    draw = rng.integers(0, 1 << 32, size=image.shape, dtype=np.uint32)
    cell = (draw >> np.uint32(32 - bits)).astype(np.int32)
    cell += image.astype(np.int32) << bits
    draw &= np.uint32((1 << (32 - bits)) - 1)
    return np.where(draw < limit.take(cell), own.take(cell), other.take(cell))


def _extremes(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Greatest and smallest of the three channels, (H, W) each."""
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    return np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)


@lru_cache(maxsize=64)
def _brightness_table(shift: float) -> np.ndarray:
    """uint8 (256 * 256,): gray level that x becomes where the greatest channel is v, at v * 256 + x."""
    v, x = np.arange(256.0)[:, None], np.arange(256.0)
    raised = np.clip(v + 255 * shift, 0, 255)
    scaled = np.where(v > 0, x * raised / np.maximum(v, 1), raised)
    return np.clip(scaled + 1e-9, 0, 255).astype(np.uint8).ravel()


def brightness(image: np.ndarray, shift: float, rng: Rng | None = None) -> np.ndarray:
    """V of HSV raised by `shift`: hue and saturation kept, so every channel is scaled by V'/V."""
    greatest, _ = _extremes(image)
    return _brightness_table(shift).take((greatest.astype(np.uint16) << np.uint16(8))[..., None] | image)


@lru_cache(maxsize=32)
def _saturation_table(gain: float, shift: float) -> np.ndarray:
    """S'/S at greatest * 256 + smallest, float32 (65536,)."""
    v, low = np.arange(256.0)[:, None], np.arange(256.0)
    old = np.where(v > 0, np.maximum(v - low, 0) / np.maximum(v, 1), 0.0)
    ratio = np.where(old > 0, np.clip(old * gain + shift, 0, 1) / np.where(old > 0, old, 1), 0.0)
    return ratio.astype(np.float32).ravel()


def saturate(image: np.ndarray, gain: float, shift: float, rng: Rng) -> np.ndarray:
    """S of HSV becomes gain * S + shift. A gray pixel has hue 0, so a shift makes it red, as in the published
    code."""
    greatest, smallest = _extremes(image)
    ratio = _saturation_table(gain, shift)
    cell = (greatest.astype(np.uint16) << np.uint16(8)) | smallest
    v = torch.from_numpy(greatest).float()[..., None]
    out = v - (v - to_float(image)) * torch.from_numpy(ratio.take(cell))[..., None]
    if shift > 0:
        flat = torch.from_numpy(greatest == smallest)[..., None]
        out[..., 1:] = torch.where(flat, v * (1 - shift), out[..., 1:])
    return to_bytes(out.add_(1e-3))


def contrast(image: np.ndarray, gain: float, rng: Rng) -> np.ndarray:
    """(x - mean) * gain + mean, the mean of each channel."""
    x = to_float(image)
    mean = x.sum((0, 1), dtype=torch.float64) / (x.shape[0] * x.shape[1])
    return to_bytes(x.mul_(gain).add_((mean * (1 - gain)).float()))


def pixelate(image: np.ndarray, scale: float, rng: Rng) -> np.ndarray:
    """Shrunk by `scale` and enlarged again, both by a box filter."""
    height, width = image.shape[:2]
    size = max(1, int(width * scale)), max(1, int(height * scale))
    small = Image.fromarray(image).resize(size, Image.Resampling.BOX)
    return np.array(small.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(image: np.ndarray, quality: int, rng: Rng) -> np.ndarray:
    """Written as JPEG and read again."""
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))
