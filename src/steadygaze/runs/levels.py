"""Is that how these images were normalised? Pictures have whole grey levels of 0..255; undone with another mean and std than they
were normalised with, they have not. Most wrong guesses leave the pixels within [0, 1], so the range alone finds few of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.runs.verify import IMAGENET

USUAL = (
    IMAGENET,
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
)
NEAR = 0.02  # of a grey level; float32 comes to about 0.0001
FEWEST = 8  # levels that pictures have at least: fewer may fit anything

Normalisation = tuple[Sequence[float], Sequence[float]]


def whole_levels(images: Float[Tensor, "b 3 h w"], normal: Normalisation) -> bool:
    """Whether the images, with their normalisation undone, have grey levels of 0..255 and nothing between."""
    m, s = (
        torch.tensor(list(v), dtype=torch.float64, device=images.device).view(1, -1, 1, 1) for v in normal
    )
    levels = 255 * (images.detach().double() * s + m)
    nearest = levels.round()
    whole = (levels - nearest).abs().max() < NEAR and nearest.min() >= 0 and nearest.max() <= 255
    return bool(whole) and len(nearest.unique()) >= FEWEST


def fits(images: Float[Tensor, "b 3 h w"], normal: Normalisation) -> bool:
    """True: whole grey levels; False: cannot be told (resized as floating point, half precision); an error: they are whole, but with
    another of the usual normalisations."""
    if images.dtype not in (torch.float32, torch.float64):
        return False
    if whole_levels(images, normal):
        return True
    for other in USUAL:
        if whole_levels(images, other):
            mean, std = (list(v) for v in other)
            raise BadInput(
                f"images: expected them normalised with mean {list(normal[0])} and std {list(normal[1])}, but they have whole grey levels "
                f"with mean {mean} and std {std}: give mean={mean}, std={std} if that is how they were made, or normalise them as expected"
            )
    return False
