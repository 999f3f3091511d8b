"""Frost textures, made once in memory: ice crystals drawn from a fixed seed.

The six images published with ImageNet-C come from the web and carry no license of their own, so none is
shipped. Each texture here stands for one of them: it has its mean color, its quantiles of gray, and its
power in each octave of frequency, so that the corrupted images agree in mean, variance and structural
similarity. A folder with the published images (frost1.png .. frost6.jpg) can be given instead.

For small images the published scripts shrink the texture by `cv2.resize` (linear, without a low-pass filter),
so single pixels of ice remain; `_linear_resize` does the same.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from steadygaze.errors import InputError

HEIGHT, WIDTH = 400, 600
PUBLISHED = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")
SHARES = (0.01, 0.1, 0.5, 0.9, 0.99)
OCTAVES = (1.5, 3.0, 6.0, 12.0, 24.0, 48.0, 88.0)  # cycles in 224 pixels


@dataclass(frozen=True)
class Ice:
    """What a texture shares with random parts, 224 pixels wide, of its published image at 1.1 of its size."""

    color: tuple[float, float, float]  # mean of red, green, blue
    spread: tuple[float, float, float]  # standard deviation of each
    gray: tuple[float, float, float, float, float]  # quantiles at SHARES
    power: tuple[float, float, float, float, float, float, float]  # log2 of the mean power at OCTAVES
    crystals: int
    length: tuple[float, float]
    barbs: bool
    tint: float = 0.0  # share of color that comes from slow changes of hue


# fmt: off
_BRIGHT = Ice((198, 202, 211), (20, 21, 21), (142, 176, 207, 227, 238),
              (30.6, 27.7, 26.2, 24.9, 22.8, 21.1, 17.9), 3000, (15, 60), False)
TEXTURES = (
    Ice((78, 149, 165), (28, 16, 15), (98, 109, 128, 156, 178),
        (31.1, 28.1, 25.0, 22.4, 21.2, 20.3, 17.8), 4000, (4, 20), False, 0.5),
    _BRIGHT,
    _BRIGHT,
    Ice((144, 159, 171), (26, 26, 27), (86, 125, 160, 188, 224),
        (30.7, 27.6, 26.6, 25.6, 24.3, 22.8, 19.9), 9000, (4, 18), False),
    Ice((97, 108, 120), (35, 34, 33), (43, 65, 105, 154, 203),
        (31.5, 29.5, 28.1, 26.1, 24.3, 22.3, 19.9), 900, (20, 60), True),
    Ice((69, 90, 97), (32, 39, 44), (18, 37, 83, 137, 173),
        (33.8, 31.2, 27.9, 26.1, 24.4, 22.6, 19.6), 260, (60, 150), True),
)
# fmt: on


def _crystals(ice: Ice, rng: np.random.Generator) -> np.ndarray:
    """Needles or feathers in the directions of a slowly changing field, (HEIGHT, WIDTH) float32."""
    canvas = Image.new("L", (2 * WIDTH, 2 * HEIGHT), 40)
    pen = ImageDraw.Draw(canvas)
    turn = _slow_noise(rng) * 0.9
    for _ in range(ice.crystals):
        x, y = rng.uniform(0, WIDTH), rng.uniform(0, HEIGHT)
        angle = 2.5 * turn[int(y), int(x)] + rng.normal(0, 0.5) + math.pi * rng.integers(0, 2)
        length = rng.uniform(*ice.length)
        light = int(rng.uniform(70, 255))
        cos, sin = math.cos(angle), math.sin(angle)
        end = (2 * (x + length * cos), 2 * (y + length * sin))
        thick = length * (0.05 if ice.barbs else 0.12)
        pen.polygon(
            [(2 * x - thick * sin, 2 * y + thick * cos), (2 * x + thick * sin, 2 * y - thick * cos), end],
            fill=light,
        )
        pen.line([(2 * x, 2 * y), end], fill=max(0, light - 60))
        for along in np.arange(3, length, 3.0) if ice.barbs else ():
            reach = 0.22 * (length - along) + 2
            for side in (-1, 1):
                way = angle + side * 0.9
                start = (2 * (x + along * cos), 2 * (y + along * sin))
                tip = (start[0] + 2 * reach * math.cos(way), start[1] + 2 * reach * math.sin(way))
                pen.line([start, tip], fill=int(np.clip(light + rng.normal(0, 40), 0, 255)), width=2)
    return np.asarray(canvas.resize((WIDTH, HEIGHT), Image.Resampling.BOX), dtype=np.float32)


def _slow_noise(rng: np.random.Generator) -> np.ndarray:
    """Clouds of zero mean and unit deviation, (HEIGHT, WIDTH)."""
    seeds = Image.fromarray(rng.standard_normal((6, 9)).astype(np.float32))
    cloud = np.asarray(seeds.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
    return (cloud - cloud.mean()) / cloud.std()


def _shaped(gray: np.ndarray, ice: Ice) -> np.ndarray:
    """The same image with the power of `ice` in each octave, then with its quantiles of gray."""
    fy, fx = np.fft.fftfreq(HEIGHT)[:, None] * 224, np.fft.rfftfreq(WIDTH) * 224
    radius = np.hypot(fy, fx)
    spectrum = np.fft.rfft2(gray - gray.mean())
    power = np.abs(spectrum) ** 2
    gains = []
    for middle, target in zip(OCTAVES, ice.power, strict=True):
        band = (radius >= middle / 1.5) & (radius < middle * 1.5)
        gains.append(0.5 * (target - math.log2(power[band].mean())))
    gain = np.exp2(np.interp(np.log2(np.maximum(radius, 0.3)), np.log2(OCTAVES), gains))
    shaped = np.fft.irfft2(spectrum * gain, s=gray.shape)
    order = np.empty(shaped.size)
    order[shaped.ravel().argsort()] = (np.arange(shaped.size) + 0.5) / shaped.size
    low, high = (
        ice.gray[0] - 0.4 * (ice.gray[1] - ice.gray[0]),
        ice.gray[4] + 0.4 * (ice.gray[4] - ice.gray[3]),
    )
    levels = np.interp(order, (0.0, *SHARES, 1.0), (max(0.0, low), *ice.gray, min(255.0, high)))
    return levels.reshape(shaped.shape)


@lru_cache(maxsize=len(PUBLISHED))
def texture(index: int) -> np.ndarray:
    """Texture 0..5, uint8 (HEIGHT, WIDTH, 3), always the same."""
    ice = TEXTURES[index]
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(7919, spawn_key=(index,))))
    gray = _shaped(_crystals(ice, rng) + 25 * _slow_noise(rng), ice)
    z = (gray - gray.mean()) / gray.std()
    hue = _slow_noise(rng)
    keep = math.sqrt(1 - ice.tint**2)
    shades = (keep * z + ice.tint * hue, z, keep * z - ice.tint * hue)
    planes = [
        mean + spread * shade for mean, spread, shade in zip(ice.color, ice.spread, shades, strict=True)
    ]
    return np.clip(np.stack(planes, axis=-1) + 0.5, 0, 255).astype(np.uint8)


def _linear_taps(count: int, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The two source pixels of each new pixel of an axis, and their weights in 2048ths, (n,) each."""
    place = ((np.arange(round(count * scale)) + 0.5) * (1 / scale) - 0.5).astype(np.float32)
    first = np.floor(place)
    pixels = [np.clip(first + step, 0, count - 1).astype(np.int32) for step in (0, 1)]
    weights = [np.rint(share * 2048).astype(np.int32) for share in (1 - (place - first), place - first)]
    return pixels[0], pixels[1], weights[0], weights[1]


def _linear_resize(image: np.ndarray, scale: float) -> np.ndarray:
    """`cv2.resize(image, (0, 0), fx=scale, fy=scale)`, uint8 (H, W, C): each new pixel is interpolated
    between the two nearest old ones of each axis, with OpenCV's integer arithmetic."""
    top, bottom, above, below = _linear_taps(image.shape[0], scale)
    left, right, before, after = _linear_taps(image.shape[1], scale)
    x = image.astype(np.int32)
    rows = (x[:, left] * before[:, None] + x[:, right] * after[:, None]) >> 4
    high, low = rows[top] * above[:, None, None], rows[bottom] * below[:, None, None]
    return (((high >> 16) + (low >> 16) + 2) >> 2).astype(np.uint8)


@lru_cache(maxsize=64)
def _layer_image(index: int, folder: str | None, scale: float) -> np.ndarray:
    """One texture or published image at `scale` of the published size, uint8."""
    if folder is None:
        image, scale = Image.fromarray(texture(index)), scale / 1.1
    else:
        path = Path(folder) / PUBLISHED[index]
        if not path.is_file():
            raise InputError(
                f"expected the published frost images {', '.join(PUBLISHED)} in {folder}; "
                f"{path.name} is missing"
            )
        image = Image.open(path).convert("RGB")
    if abs(scale - 1) < 1e-9:
        return np.array(image)
    if scale < 0.5:
        return _linear_resize(np.array(image), scale)
    size = math.ceil(image.width * scale - 1e-9), math.ceil(image.height * scale - 1e-9)
    return np.array(image.resize(size, Image.Resampling.BICUBIC))


def frost_layer(
    shape: tuple[int, int], scale: float, count: int, folder: str | None, rng: np.random.Generator
) -> np.ndarray:
    """A random part, uint8 (H, W, 3), of one of the first `count` textures, enlarged where the image is
    larger."""
    index = int(rng.integers(count))
    whole = _layer_image(index, folder, scale)
    grow = max(shape[0] / (whole.shape[0] - 1), shape[1] / (whole.shape[1] - 1), 1.0)
    if grow > 1:
        whole = _layer_image(index, folder, scale * math.ceil(grow * 1.1 * 4) / 4)
    top = int(rng.integers(whole.shape[0] - shape[0]))
    left = int(rng.integers(whole.shape[1] - shape[1]))
    return whole[top : top + shape[0], left : left + shape[1]]
