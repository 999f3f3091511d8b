"""Filters and random draws that the corruptions share: quick on one thread, no state, no global random
numbers.

Images are float32 tensors (H, W, C), channels last, so that one shift of a whole image is one strided
view and a filter is a sum of such views.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

LEVELS = 1 << 16


@lru_cache(maxsize=1)
def _normal_quantiles() -> np.ndarray:
    """The 65,536 midpoint quantiles of N(0, 1) in float32, scaled to unit variance; the ends are at 4.3
    sigma."""
    middle = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    quantiles = torch.special.ndtri(middle)
    return (quantiles / quantiles.square().mean().sqrt()).float().numpy()


def draw16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform uint16."""
    return rng.integers(0, LEVELS, size=shape, dtype=np.uint16)


def draw_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) in float32, drawn from 65,536 equally likely values: several times as quick as a ziggurat."""
    return _normal_quantiles().take(draw16(rng, shape))


@lru_cache(maxsize=32)
def normal_steps(scale: float) -> np.ndarray:
    """floor(scale * N(0, 1)) at the 65,536 quantiles, int16: to whole gray levels it adds what the noise
    itself adds once the fraction is cut off."""
    return np.floor(_normal_quantiles().astype(np.float64) * scale).astype(np.int16)


def to_float(image: np.ndarray) -> Tensor:
    """uint8 (H, W, C), also a read-only one -> float32 tensor of its own, in 0..255."""
    return torch.from_numpy(image.astype(np.float32, order="C"))


def to_bytes(x: Tensor) -> np.ndarray:
    """Clip to 0..255 and cut off the fraction, as the published corruptions do."""
    return x.clamp_(0, 255).to(torch.uint8).numpy()


def pad_edge(x: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
    """(H, W, C) grown by copies of its border pixels."""
    height, width, channels = x.shape
    out = x.new_empty(height + top + bottom, width + left + right, channels)
    body = out[top : top + height]
    body[:, left : left + width] = x
    body[:, :left] = x[:, :1]
    body[:, left + width :] = x[:, -1:]
    out[:top] = body[:1]
    out[top + height :] = body[-1:]
    return out


def add_shifted(padded: Tensor, taps: Iterable[tuple[int, int, float]], height: int, width: int) -> Tensor:
    """sum of weight * padded[y : y + height, x : x + width] over taps (y, x, weight) -> (height, width,
    C)."""
    channels = padded.shape[2]
    rows = padded.flatten(1)
    total = padded.new_zeros(height, width * channels)
    for y, x, weight in taps:
        total.add_(rows[y : y + height, x * channels : (x + width) * channels], alpha=weight)
    return total.view(height, width, channels)


def gaussian_weights(sigma: float, truncate: float) -> list[float]:
    """Sampled Gaussian of radius int(truncate * sigma + 0.5), sum 1."""
    radius = int(truncate * sigma + 0.5)
    raw = [math.exp(-0.5 * (k / sigma) ** 2) if k else 1.0 for k in range(-radius, radius + 1)]
    total = sum(raw)
    return [value / total for value in raw]


def _fold(index: Tensor, size: int) -> Tensor:
    """Half-sample reflection (d c b a | a b c d | d c b a) of any index into 0..size - 1."""
    index = index % (2 * size)
    return torch.where(index < size, index, 2 * size - 1 - index)


def gaussian(
    x: Tensor, sigma: float | tuple[float, float], *, truncate: float = 4.0, border: str = "edge"
) -> Tensor:
    """Separable Gaussian of (H, W, C); `border` is "edge" (copies) or "reflect" (half-sample)."""
    sigma_y, sigma_x = sigma if isinstance(sigma, tuple) else (sigma, sigma)
    height, width = x.shape[:2]
    for axis, scale in ((0, sigma_y), (1, sigma_x)):
        weights = gaussian_weights(scale, truncate) if scale > 0 else [1.0]
        radius = len(weights) // 2
        if not radius:
            continue
        if border == "reflect":
            padded = x.index_select(axis, _fold(torch.arange(-radius, x.shape[axis] + radius), x.shape[axis]))
        else:
            padded = pad_edge(x, *((radius, radius, 0, 0) if axis == 0 else (0, 0, radius, radius)))
        taps = [(k, 0, w) if axis == 0 else (0, k, w) for k, w in enumerate(weights)]
        x = add_shifted(padded, taps, height, width)
    return x


def motion(x: Tensor, radius: int, sigma: float, angle: float) -> Tensor:
    """One-sided Gaussian smear of 2 * radius + 1 steps along `angle` (degrees), border copied; as
    ImageMagick."""
    height, width = x.shape[:2]
    length = 2 * radius + 1
    raw = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(length)]
    total = sum(raw)
    sin, cos = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    weights: dict[tuple[int, int], float] = {}  # where to look: steps that round to one pixel are one tap
    for step, value in enumerate(raw):
        at = (math.ceil(step * sin - 0.5), math.ceil(step * cos - 0.5))
        weights[at] = weights.get(at, 0.0) + value / total
    top, left = max(0, -min(y for y, _ in weights)), max(0, -min(x for _, x in weights))
    bottom, right = max(0, max(y for y, _ in weights)), max(0, max(x for _, x in weights))
    padded = pad_edge(x, top, bottom, left, right)
    return add_shifted(padded, ((y + top, x + left, w) for (y, x), w in weights.items()), height, width)


def _stretch_rows(x: Tensor, factor: float) -> Tensor:
    """The middle rows of (H, W, C) spread over all H, linear with aligned ends."""
    length = x.shape[0]
    part = math.ceil(length / factor)
    size = round(part * factor)
    skip = (size - length) // 2
    position = (torch.arange(length, dtype=torch.float64) + skip) * ((part - 1) / (size - 1))
    below = position.floor().clamp_(max=part - 2)
    row = below.long() + (length - part) // 2
    flat = x.flatten(1)
    share = (position - below).float()[:, None]
    return flat.index_select(0, row).lerp_(flat.index_select(0, row + 1), share).view(x.shape)


def zoom(x: Tensor, factor: float) -> Tensor:
    """Middle part of (H, W, C) enlarged by `factor` to (H, W, C), bilinear with aligned corners. Where the
    enlarged part is too big, it is cut on all sides. The result lies in memory column by column."""
    return _stretch_rows(_stretch_rows(x, factor).transpose(0, 1), factor).transpose(0, 1)


def sample(x: Tensor, rows: Tensor, columns: Tensor, *, whole: bool = False) -> Tensor:
    """Bilinear values of (H, W, C) at pixel coordinates (H', W') each. Beyond the border it is mirrored:
    about the pixel's edge, or, `whole`, about its center."""
    height, width = x.shape[:2]
    if whole:
        grid = torch.stack((columns * 2 / max(width - 1, 1) - 1, rows * 2 / max(height - 1, 1) - 1), dim=-1)
    else:
        grid = torch.stack(((columns * 2 + 1) / width - 1, (rows * 2 + 1) / height - 1), dim=-1)
    planes = x.permute(2, 0, 1).unsqueeze(0)
    out = torch.nn.functional.grid_sample(
        planes, grid.unsqueeze(0), mode="bilinear", padding_mode="reflection", align_corners=whole
    )
    return out[0].permute(1, 2, 0)
