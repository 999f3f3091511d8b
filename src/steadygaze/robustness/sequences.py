"""The perturbation sequences of ImageNet-P and CIFAR-10-P, made on the fly and seeded.

D. Hendrycks, T. Dietterich, arXiv:1903.12261. A sequence is one image changed a little from frame to frame;
`scores` counts how often the prediction flips. Frames are made in memory: the published ones went through
video compression. Motion blur is the one of the corruptions, not ImageMagick's own.

For the two kinds of noise frame 0 is the clean image and every other frame is compared with it; for all
others each frame follows on the one before.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from steadygaze.data.datasets.imagenet import PERTURBATIONS
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.corruptions.corrupt import SMALLEST, check_image, check_settings, generator
from steadygaze.robustness.corruptions.filters import motion, to_bytes, to_float
from steadygaze.robustness.corruptions.pixelwise import brightness, gaussian_noise, shot_noise
from steadygaze.robustness.corruptions.weather import fallen, flakes
from steadygaze.robustness.protocols import STILL

# number of frames, then what the kind needs
IMAGENET: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (31, (0.03, 0.05, 0.08)),
    "shot_noise": (31, (300, 120, 60)),
    "motion_blur": (31, 10, 3.0, 4.0),
    "zoom_blur": (31, 0.004),
    "snow": (31, 3.0, 14, 4.0),
    "brightness": (31, 0.02),
    "translate": (41, 20),
    "rotate": (31, 1.0),
    "tilt": (31, 1.0),
    "scale": (31, 0.4, 0.025),
}
CIFAR: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (31, (0.02, 0.04, 0.06)),
    "shot_noise": (31, (700, 400, 200)),
    "motion_blur": (21, 6, 1.8, 9.0),
    "zoom_blur": (31, 0.004),
    "snow": (31, 2.0, 10, 2.0),
    "brightness": (31, 0.015),
    "translate": (16, 7),
    "rotate": (31, 1.0),
    "tilt": (31, 0.75),
    "scale": (31, 0.7, 0.02),
}
SETTINGS = {"imagenet": IMAGENET, "cifar": CIFAR}


def _crop(pixels: np.ndarray, size: int) -> np.ndarray:
    """The middle (size, size, 3)."""
    top, left = round((pixels.shape[0] - size) / 2), round((pixels.shape[1] - size) / 2)
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


def _affine(
    pil_image: Image.Image, *, angle: float = 0.0, shift: float = 0.0, scale: float = 1.0, smooth: bool = True
) -> np.ndarray:
    """Turn clockwise by `angle` degrees, scale about the center, move right by `shift`; black outside."""
    cos, sin = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    x, y = pil_image.width / 2, pil_image.height / 2
    back = (cos, sin, x - cos * (x + shift) - sin * y, -sin, cos, y + sin * (x + shift) - cos * y)
    how = Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST
    return np.asarray(pil_image.transform(pil_image.size, Image.Transform.AFFINE, back, how))


def _tilted(pil_image: Image.Image, degrees: float) -> np.ndarray:
    """Turn the image's plane by `degrees` about both axes, seen from one diagonal away; black outside."""
    width, height = pil_image.size
    far, turn = math.hypot(width, height), math.radians(degrees)
    cos, sin = math.cos(turn), math.sin(turn)
    flat = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1], [0, 0, 1]])
    about_x = np.array([[1, 0, 0, 0], [0, cos, -sin, 0], [0, sin, cos, 0], [0, 0, 0, 1]])
    about_y = np.array([[cos, 0, -sin, 0], [0, 1, 0, 0], [sin, 0, cos, 0], [0, 0, 0, 1]])
    away = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, far], [0, 0, 0, 1]])
    eye = np.array([[far, 0, width / 2, 0], [0, far, height / 2, 0], [0, 0, 1, 0]])
    half = np.array(
        [[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]]
    )  # Pillow counts from a pixel's corner, the definition from its center
    back = np.linalg.inv(half @ eye @ away @ about_x @ about_y @ flat @ np.linalg.inv(half))
    back /= back[2, 2]
    way = tuple(float(value) for value in back.ravel()[:8])
    return np.asarray(
        pil_image.transform(pil_image.size, Image.Transform.PERSPECTIVE, way, Image.Resampling.BILINEAR)
    )


def _motion_blur(image: np.ndarray, frames: int, radius: int, sigma: float, degrees: float) -> np.ndarray:
    """The smear turns by `degrees` a frame and ends at angle 0."""
    x = to_float(image)
    return np.stack([to_bytes(motion(x, radius, sigma, (k - frames + 1) * degrees)) for k in range(frames)])


def _snow(
    image: np.ndarray, frames: int, size: float, radius: int, sigma: float, rng: np.random.Generator
) -> np.ndarray:
    """The same flakes fall at -150 degrees, turning by 4 degrees a frame."""
    layer = flakes((image.shape[0], image.shape[1]), 0.05, 0.3, size, 0.5, rng)
    return np.stack([fallen(image, motion(layer, radius, sigma, 4 * k - 150), 0.85) for k in range(frames)])


def _zoom_blur(pil_image: Image.Image, size: int, frames: int, step: float) -> np.ndarray:
    """Frame k is the mean of the image and its k enlargements by 1 + step, 1 + 2 step, ..."""
    total = to_float(_crop(np.asarray(pil_image), size))
    out = [total.to(torch.uint8).numpy()]
    for k in range(1, frames):
        total = total + to_float(_crop(_affine(pil_image, scale=1 + step * k), size))
        out.append(to_bytes((total / (k + 1)).add_(1e-3)))
    return np.stack(out)


def sequence(
    image: np.ndarray,
    name: str,
    *,
    seed: int,
    difficulty: int = 1,
    size: int | None = None,
    settings: str | None = None,
) -> np.ndarray:
    """Frames, uint8 (T, size, size, 3), of one image, uint8 (H, W, 3).

    The image is changed as a whole and then cut to its middle, so give it with a margin: the published
    sequences come from a shorter side of 256.

    Args:
        name: One of PERTURBATIONS.
        size: Side of the frames; by default 224, or the shorter side where that is less.
        difficulty: 1, 2 or 3, the strength of the noise; the other kinds have the same frames at any
            difficulty, and `scores` then compares frames that lie that far apart.
        settings: "imagenet" or "cifar"; None chooses "cifar" where the frame is at most 64 pixels.

    Examples:
        >>> sequence(np.zeros((40, 40, 3), np.uint8), "translate", seed=0, size=32).shape
        (16, 32, 32, 3)
    """
    check_image(image, batch=False)
    if name not in PERTURBATIONS:
        raise UnknownNameError("perturbation", str(name), PERTURBATIONS)
    if isinstance(difficulty, bool) or difficulty not in (1, 2, 3):
        raise InputError(f"expected a difficulty of 1, 2 or 3, got {difficulty!r}")
    shorter = min(image.shape[:2])
    size = min(224, shorter) if size is None else size
    if not SMALLEST <= size <= shorter:
        raise InputError(
            f"expected a size of {SMALLEST} to {shorter}, the image's shorter side, got {size}; "
            "enlarge the image first"
        )
    frames, *values = SETTINGS[check_settings(settings, size, size)][name]
    rng = generator(seed, 0, f"sequence {name}", difficulty if name in STILL else 1)
    middle, pil_image = _crop(image, size), Image.fromarray(np.ascontiguousarray(image))
    centered = range(-(frames // 2), frames - frames // 2)
    match name:
        case "gaussian_noise" | "shot_noise":
            noise = gaussian_noise if name == "gaussian_noise" else shot_noise
            level = values[0][difficulty - 1]
            return np.stack([middle, *(noise(middle, level, rng) for _ in range(1, frames))])
        case "motion_blur":
            return _motion_blur(middle, frames, *values)
        case "zoom_blur":
            return _zoom_blur(pil_image, size, frames, *values)
        case "snow":
            return _snow(middle, frames, values[0], values[1], values[2], rng)
        case "brightness":
            return np.stack([brightness(middle, round(k * values[0], 6)) for k in centered])
        case "translate":
            changes = [partial(_affine, pil_image, shift=k - values[0], smooth=False) for k in range(frames)]
        case "rotate":
            changes = [partial(_affine, pil_image, angle=k * values[0]) for k in centered]
        case "tilt":
            changes = [partial(_tilted, pil_image, k * values[0]) for k in centered]
        case _:
            changes = [partial(_affine, pil_image, scale=values[0] + k * values[1]) for k in range(frames)]
    return np.stack([_crop(change(), size) for change in changes])
