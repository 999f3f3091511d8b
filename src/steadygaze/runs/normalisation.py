"""The normalisation of images that are given in memory: given, known of the model, or ImageNet's.

Images have whole grey levels of 0..255. Undone with another mean and standard deviation than they were
normalised with, they do not. Most wrong guesses leave the pixels within [0, 1], so the range alone would find
few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import BadInput
from steadygaze.loading.loaded import LoadedModel

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
USUAL = (
    IMAGENET,
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
)
TOLERANCE = 0.02  # of a grey level; float32 comes to about 0.0001
FEWEST_LEVELS = 8  # grey levels that images have at least: fewer may fit any normalisation


class Normalisation(NamedTuple):
    """Mean and standard deviation by channel; known: given or declared by the model, not assumed."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    known: bool = True


def normalisation_of(
    model: nn.Module,
    loaded: LoadedModel | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Normalisation:
    """The given mean and std, else the model's own, else ImageNet's."""
    if mean is not None and std is not None:
        return Normalisation(tuple(map(float, mean)), tuple(map(float, std)))
    if mean is not None or std is not None:
        raise BadInput("mean, std: expected both or none")
    if loaded is not None:
        return Normalisation(tuple(loaded.mean), tuple(loaded.std))
    config = getattr(model, "pretrained_cfg", None) or {}
    if "mean" in config and "std" in config:
        return Normalisation(tuple(config["mean"]), tuple(config["std"]))
    return Normalisation(*IMAGENET, known=False)


Statistics = tuple[Sequence[float], Sequence[float]]  # mean, std


def has_whole_levels(images: Float[Tensor, "b 3 h w"], statistics: Statistics) -> bool:
    """Whether the images, with this normalisation undone, have grey levels of 0..255 and nothing between."""
    mean, std = (
        torch.tensor(list(v), dtype=torch.float64, device=images.device).view(1, -1, 1, 1) for v in statistics
    )
    levels = 255 * (images.detach().double() * std + mean)
    nearest = levels.round()
    whole = (levels - nearest).abs().max() < TOLERANCE and nearest.min() >= 0 and nearest.max() <= 255
    return bool(whole) and len(nearest.unique()) >= FEWEST_LEVELS


def check_levels(images: Float[Tensor, "b 3 h w"], statistics: Statistics) -> bool:
    """True: the images bear this normalisation out. False: unknown (resized as floating point, half
    precision).

    Raises `BadInput` if the images have whole grey levels under another of the usual normalisations.
    """
    if images.dtype not in (torch.float32, torch.float64):
        return False
    if has_whole_levels(images, statistics):
        return True
    for usual in USUAL:
        if has_whole_levels(images, usual):
            expected_mean, expected_std = (list(v) for v in statistics)
            mean, std = (list(v) for v in usual)
            raise BadInput(
                f"images: expected normalisation with mean {expected_mean} and std {expected_std}, but the "
                "images have "
                f"whole grey levels with mean {mean} and std {std}: give mean={mean}, std={std} if that is "
                "how they "
                "were made, or normalise them as expected"
            )
    return False
