"""The model that teaches in distillation. It sees the student's pictures in its own normalisation, and must know the same classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import BadInput
from steadygaze.loading.load import Loaded, load_model
from steadygaze.training.data import Shape
from steadygaze.training.differentiable_maps import joined
from steadygaze.training.losses.losses import outputs_of
from steadygaze.training.recipe import Distillation


class Teacher(nn.Module):
    """Pictures (B, 3, H, W) as the student takes them -> what the teacher says of them.

    x σ + μ is the picture, and (x σ + μ − μ') / σ' what the teacher takes: x · scale + shift.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, loaded: Loaded, shape: Shape) -> None:
        super().__init__()
        self.model = loaded.model
        mean, std, own_mean, own_std = (
            torch.tensor(v).view(3, 1, 1) for v in (shape.mean, shape.std, loaded.mean, loaded.std)
        )
        self.same = tuple(shape.mean) == tuple(loaded.mean) and tuple(shape.std) == tuple(loaded.std)
        self.register_buffer("scale", std / own_std)
        self.register_buffer("shift", (mean - own_mean) / own_std)

    def forward(self, images: Tensor) -> Any:
        return self.model(images if self.same else images * self.scale.to(images) + self.shift.to(images))


def teacher_of(asked: Distillation, shape: Shape, classes: int, device: Any) -> Teacher:
    """The teacher that a recipe names, tried on one picture of the student's size before the first step."""
    loaded = load_model(asked.teacher, asked.checkpoint, device=device)
    made = Teacher(loaded, shape).to(device).eval()
    height, width = shape.size
    try:
        with torch.no_grad():
            count = joined(outputs_of(made(torch.zeros(1, 3, height, width, device=device)))).shape[-1]
    except (
        AssertionError,
        RuntimeError,
        ValueError,
    ) as error:  # timm, torch and transformers each say it in their way
        raise BadInput(
            f"losses.distillation.teacher: {asked.teacher} does not take the student's pictures of {height}x{width} ({error}). "
            "Take a teacher of that size."
        ) from error
    if count != classes:
        raise BadInput(
            f"losses.distillation.teacher: expected the student's {classes} classes, {asked.teacher} has {count}"
        )
    return made
