"""Images as people have them, as the tensor that a model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from steadygaze.errors import InputError


@dataclass(frozen=True)
class Inputs:
    """A model, its images (B, 3, H, W), the images to show below a map, and their names."""

    model: Any
    images: Tensor
    shown: tuple[Image.Image, ...] | None
    names: tuple[str, ...]


def prepare_inputs(
    model: Any, images: Any, transform: Callable[[Image.Image], Tensor] | None = None
) -> Inputs:
    """The images as a tensor: a tensor is taken as it is, files and PIL images need a transform."""
    if isinstance(images, Tensor):
        return Inputs(model, images, None, tuple(str(i) for i in range(len(images))))
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    transform = transform or getattr(model, "transform", None)
    if transform is None or not isinstance(images, Sequence):
        raise InputError("images: expected a tensor (B, 3, H, W), or images and transform=")
    pictures = [i if isinstance(i, Image.Image) else Image.open(i).convert("RGB") for i in images]
    names = tuple(Path(i).stem if isinstance(i, str | Path) else str(n) for n, i in enumerate(images))
    return Inputs(model, torch.stack([transform(i) for i in pictures]), tuple(pictures), names)
