"""Placeholder, replaced by the merge: a model and images as people have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from steadygaze.data.images import find_images, read_image
from steadygaze.errors import InputError


@dataclass(frozen=True)
class Inputs:
    """A model and preprocessed images, with what is needed to display them."""

    model: Any
    images: Tensor
    shown: tuple[Image.Image, ...] | None
    names: tuple[str, ...]


def prepare_inputs(
    model: Any, images: Any, transform: Callable[[Image.Image], Tensor] | None = None
) -> Inputs:
    """Preprocess the images with `transform` or the model's own preprocessing; tensors pass unchanged."""
    if isinstance(model, str):
        from steadygaze.loading.load import load_model

        model = load_model(model)
    if isinstance(images, Tensor):
        return Inputs(model, images, None, tuple(str(i) for i in range(len(images))))
    preprocess = transform or getattr(model, "preprocess", None)
    if preprocess is None:
        raise InputError("transform: expected a callable for this module")
    many = images if isinstance(images, list | tuple) else [images]
    names: list[str] = []
    opened: list[Image.Image] = []
    for image in many:
        if isinstance(image, Image.Image):
            names.append(str(len(names)))
            opened.append(image)
            continue
        for path in find_images([Path(image)]):
            names.append(path.stem)
            opened.append(read_image(path))
    batch = torch.stack([preprocess(image) for image in opened])
    shown = tuple(model.to_image(x) for x in batch) if hasattr(model, "to_image") else None
    return Inputs(model, batch, shown, tuple(names))
