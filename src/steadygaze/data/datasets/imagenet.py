"""The classes of ImageNet, in the order of the logits."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

# ImageNet-C and ImageNet-P (D. Hendrycks, T. Dietterich, arXiv:1903.12261)
COMMON = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
CORRUPTIONS = COMMON + EXTRA
SEVERITIES = (1, 2, 3, 4, 5)
PERTURBATIONS = (
    "gaussian_noise",
    "shot_noise",
    "motion_blur",
    "zoom_blur",
    "snow",
    "brightness",
    "translate",
    "rotate",
    "tilt",
    "scale",
)


IMAGENET_CLASSES = 1000


@cache
def imagenet_synsets(subset: str = "") -> tuple[str, ...]:
    """The 1,000 synsets of ImageNet; subset "a" or "r": the 200 of ImageNet-A or -R."""
    name = f"imagenet_{subset}_synsets.txt" if subset else "imagenet_synsets.txt"
    return tuple((files("timm.data") / "_info" / name).read_text(encoding="utf-8").split())


@cache
def imagenet_names() -> tuple[str, ...]:
    """The names of the 1,000 classes."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(i) for i in range(IMAGENET_CLASSES))
