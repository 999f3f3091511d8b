"""The corruptions of ImageNet-C, Tiny-ImageNet-C and CIFAR-10-C, made on the fly and seeded.

D. Hendrycks, T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
ICLR 2019, arXiv:1903.12261. Definitions and settings are those of the published scripts for ImageNet-C
(settings "imagenet"; docs/stress.md has the measured differences), for Tiny-ImageNet-C ("tiny-imagenet") and
for CIFAR-10-C ("cifar").

Same image, name, severity, settings and seed: same bytes, in any process and order. No global random state
is used.
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS, EXTRA, SEVERITIES
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.corruptions import blurs, pixelwise, weather

__all__ = ["COMMON", "CORRUPTIONS", "EXTRA", "SEVERITIES", "corrupt"]

SMALLEST = 8  # pixels; below, a block of JPEG is larger than the image
CIFAR_UP_TO, TINY_IMAGENET_UP_TO = 48, 64  # pixels of the shorter side

Levels = tuple[tuple[Any, ...], ...]

ELASTIC = tuple(  # published in pixels of images of 224, here in widths: amplitude, smoothness, corner shift
    (amplitude / 224, smoothness / 224, corner / 224)
    for amplitude, smoothness, corner in (
        (488, 170.8, 24.4),
        (488, 19.52, 48.8),
        (12.2, 2.44, 4.88),
        (17.08, 2.44, 4.88),
        (29.28, 2.44, 4.88),
    )
)

IMAGENET: dict[str, tuple[Callable[..., np.ndarray], Levels]] = {
    "gaussian_noise": (pixelwise.gaussian_noise, ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,))),
    "shot_noise": (pixelwise.shot_noise, ((60,), (25,), (12,), (5,), (3,))),
    "impulse_noise": (pixelwise.impulse_noise, ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,))),
    "defocus_blur": (blurs.defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": (blurs.glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (blurs.motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (
        blurs.zoom_blur,
        tuple(
            (1, stop, step)
            for stop, step in ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
        ),
    ),
    "snow": (
        weather.snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (
        weather.frost,
        tuple(
            (keep, amount, 1.0, 5)
            for keep, amount in ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
        ),
    ),
    "fog": (weather.fog, ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))),
    "brightness": (pixelwise.brightness, ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,))),
    "contrast": (pixelwise.contrast, ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,))),
    "elastic_transform": (blurs.elastic_affine, ELASTIC),
    "pixelate": (pixelwise.pixelate, ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,))),
    "jpeg_compression": (pixelwise.jpeg_compression, ((25,), (18,), (15,), (10,), (7,))),
    "speckle_noise": (pixelwise.speckle_noise, ((0.15,), (0.2,), (0.35,), (0.45,), (0.6,))),
    "gaussian_blur": (blurs.gaussian_blur, ((1,), (2,), (3,), (4,), (6,))),
    "spatter": (
        weather.spatter,
        (
            (0.65, 0.3, 4, 0.69, 0.6, False),
            (0.65, 0.3, 3, 0.68, 0.6, False),
            (0.65, 0.3, 2, 0.68, 0.5, False),
            (0.65, 0.3, 1, 0.65, 1.5, True),
            (0.67, 0.4, 1, 0.65, 1.5, True),
        ),
    ),
    "saturate": (pixelwise.saturate, ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))),
}

CIFAR: dict[str, tuple[Callable[..., np.ndarray], Levels]] = {
    "gaussian_noise": (pixelwise.gaussian_noise, ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,))),
    "shot_noise": (pixelwise.shot_noise, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": (pixelwise.impulse_noise, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "defocus_blur": (blurs.defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (blurs.glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
    "motion_blur": (blurs.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (blurs.zoom_blur, tuple((1, stop, 0.01) for stop in (1.06, 1.11, 1.16, 1.21, 1.26))),
    "snow": (
        weather.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": (
        weather.frost,
        tuple(
            (keep, amount, 0.2, 5)
            for keep, amount in ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
        ),
    ),
    "fog": (weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (pixelwise.brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "contrast": (pixelwise.contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic_transform": (
        blurs.elastic_affine,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (pixelwise.pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg_compression": (pixelwise.jpeg_compression, ((80,), (65,), (58,), (50,), (40,))),
    "speckle_noise": (pixelwise.speckle_noise, ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,))),
    "gaussian_blur": (blurs.gaussian_blur, ((0.4,), (0.6,), (0.7,), (0.8,), (1.0,))),
    "spatter": (
        weather.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
    ),
    "saturate": (pixelwise.saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}

TINY_IMAGENET: dict[str, tuple[Callable[..., np.ndarray], Levels]] = {
    "gaussian_noise": (pixelwise.gaussian_noise, ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,))),
    "shot_noise": (pixelwise.shot_noise, ((250,), (100,), (50,), (30,), (15,))),
    "impulse_noise": (pixelwise.impulse_noise, ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,))),
    "defocus_blur": (blurs.defocus_blur, ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1))),
    "glass_blur": (blurs.glass_blur, ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2))),
    "motion_blur": (blurs.motion_blur, ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3))),
    "zoom_blur": CIFAR["zoom_blur"],
    "snow": (
        weather.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
    ),
    "frost": (
        weather.frost,
        tuple(
            (keep, amount, 0.3, 5)
            for keep, amount in ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55))
        ),
    ),
    "fog": (weather.fog, ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75))),
    "brightness": IMAGENET["brightness"],
    "contrast": IMAGENET["contrast"],
    "elastic_transform": (
        blurs.elastic_affine,
        ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
    ),
    "pixelate": (pixelwise.pixelate, ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,))),
    "jpeg_compression": (pixelwise.jpeg_compression, ((65,), (58,), (50,), (40,), (25,))),
    "speckle_noise": (pixelwise.speckle_noise, ((0.15,), (0.2,), (0.25,), (0.3,), (0.35,))),
    "gaussian_blur": (blurs.gaussian_blur, ((0.5,), (0.75,), (1,), (1.25,), (1.5,))),
    "spatter": (
        weather.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.6, False),
            (0.65, 0.1, 0.8, 0.7, 0.6, False),
            (0.65, 0.3, 1, 0.69, 0.6, False),
            (0.65, 0.1, 0.7, 0.68, 0.6, True),
            (0.65, 0.1, 0.5, 0.67, 0.6, True),
        ),
    ),
    "saturate": (pixelwise.saturate, ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2))),
}

SETTINGS = {"imagenet": IMAGENET, "tiny-imagenet": TINY_IMAGENET, "cifar": CIFAR}


def generator(seed: int, index: int, name: str, severity: int) -> np.random.Generator:
    """The random numbers of one image: a stream of its own for each (seed, index, name, severity)."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"expected a seed that is an integer >= 0, got {seed!r}")
    key = (index, zlib.crc32(name.encode()), severity)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(int(seed), spawn_key=key)))


def check_image(image: np.ndarray, *, batch: bool = True) -> None:
    """Raises InputError unless `image` is a uint8 array (H, W, 3), or (B, H, W, 3) where `batch`, of 8 x 8 or
    more."""
    wanted = "a uint8 array (H, W, 3) or (B, H, W, 3)" if batch else "a uint8 array (H, W, 3)"
    if not isinstance(image, np.ndarray):
        raise InputError(
            f"expected {wanted}, got {type(image).__name__}; use np.asarray(image.convert('RGB'))"
        )
    if image.ndim not in ((3, 4) if batch else (3,)) or image.shape[-1] != 3:
        hint = "convert gray and RGBA images to RGB, and put channels last"
        raise InputError(f"expected {wanted}, got shape {image.shape}; {hint}")
    if image.dtype != np.uint8:
        hint = (
            "corrupt before normalization; (255 * image).round().astype(np.uint8) turns 0..1 into gray levels"
        )
        raise InputError(f"expected {wanted}, got dtype {image.dtype}; {hint}")
    height, width = image.shape[-3:-1]
    if min(height, width) < SMALLEST:
        raise InputError(
            f"expected at least {SMALLEST} x {SMALLEST} pixels, got {height} x {width}; "
            "enlarge the image first"
        )


def check_settings(
    settings: str | None, height: int, width: int, names: Collection[str] = ("imagenet", "cifar")
) -> str:
    """One of `names`; None chooses by the shorter side."""
    if settings is None:
        side = min(height, width)
        if side > TINY_IMAGENET_UP_TO:
            return "imagenet"
        return "tiny-imagenet" if side > CIFAR_UP_TO and "tiny-imagenet" in names else "cifar"
    if settings not in names:
        raise UnknownNameError("settings", str(settings), names)
    return settings


def corrupt(
    image: np.ndarray,
    name: str,
    severity: int,
    *,
    seed: int | Sequence[int],
    settings: str | None = None,
    frost_folder: str | None = None,
) -> np.ndarray:
    """A corrupted copy of one image (H, W, 3) or a batch (B, H, W, 3), uint8 in and out.

    Args:
        name: One of CORRUPTIONS (15 of COMMON, 4 of EXTRA).
        severity: 1 (weak) .. 5 (strong).
        seed: An integer, for a batch combined with each image's index; or one integer for each image, and
            then image i of the batch is what `corrupt(batch[i], ..., seed=seed[i])` gives, however the data
            are split.
        settings: "imagenet" (for images of about 224 pixels), "tiny-imagenet" (64) or "cifar" (32). None
            chooses by the shorter side: "cifar" up to 48 pixels, "tiny-imagenet" up to 64.
        frost_folder: Folder with the six published frost images, to use instead of our textures.

    Examples:
        >>> corrupt(np.zeros((32, 32, 3), np.uint8), "gaussian_noise", 3, seed=0).shape
        (32, 32, 3)
    """
    if name not in IMAGENET:
        raise UnknownNameError("corruption", str(name), CORRUPTIONS)
    if isinstance(severity, bool) or not isinstance(severity, int | np.integer) or not 1 <= severity <= 5:
        raise InputError(
            f"expected a severity of 1, 2, 3, 4 or 5, got {severity!r}; 0 is the clean image itself"
        )
    check_image(image)
    height, width = image.shape[-3:-1]
    function, levels = SETTINGS[check_settings(settings, height, width, SETTINGS)][name]
    level = levels[severity - 1] + ((frost_folder,) if name == "frost" else ())
    images = image if image.ndim == 4 else image[None]
    if isinstance(seed, int | np.integer):
        streams = [generator(seed, index, name, int(severity)) for index in range(len(images))]
    else:
        if not isinstance(seed, Sequence | np.ndarray) or isinstance(seed, str):
            raise InputError(f"expected a seed that is an integer >= 0, or a list of them, got {seed!r}")
        seeds = list(seed)
        if len(seeds) != len(images):
            raise InputError(f"expected one seed for each of {len(images)} images, got {len(seeds)} seeds")
        streams = [generator(one, 0, name, int(severity)) for one in seeds]
    if image.ndim == 3:
        return function(np.ascontiguousarray(image), *level, streams[0])
    out = np.empty_like(image, order="C")
    for index, (one, stream) in enumerate(zip(images, streams, strict=True)):
        out[index] = function(np.ascontiguousarray(one), *level, stream)
    return out
