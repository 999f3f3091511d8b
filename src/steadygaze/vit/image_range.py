"""Normalized images: whether they look normalized (values of 0..255 do not), and how they are displayed."""

from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from steadygaze.data.preprocess import undo_normalization
from steadygaze.vit.view import ViT

PIXELS = -3.0, 4.0  # images with the normalization undone are within 0..1; noise may pass that by far
LARGEST = 20.0  # of normalized images, where the normalization is not known


def range_note(model: Any, images: Float[Tensor, "b c h w"]) -> str:
    """What is wrong with images far outside of what the model's normalization gives; "" if nothing is."""
    low, high = (float(value) for value in images.detach().float().aminmax())
    statistics = known_normalization(model)
    if statistics is None or len(statistics[0]) != images.shape[1]:
        if max(-low, high) <= LARGEST:
            return ""
        expected = f"within about -{LARGEST:g} to {LARGEST:g}, as normalized images are"
    else:
        least, most = (float(value) for value in undo_normalization(images, *statistics).aminmax())
        if PIXELS[0] <= least and most <= PIXELS[1]:
            return ""
        expected = f"normalized with mean {list(statistics[0])} and std {list(statistics[1])}"
    bytes_given = low >= 0 and high <= 255
    hint = "They look like 0..255: divide by 255, then normalize" if bytes_given else "Normalize them"
    return (
        f"images: expected values {expected}, got {low:.3g} to {high:.3g}. {hint} with the model's mean and "
        "std; the maps explain what the model sees."
    )


def known_normalization(model: Any) -> tuple[Any, Any] | None:
    """Mean and std by channel, if the model says them: the result of `load_model`, or a module of timm."""
    if isinstance(model, ViT):
        model = model.model
    mean, std = getattr(model, "mean", None), getattr(model, "std", None)
    if isinstance(model, nn.Module):
        config = getattr(model, "pretrained_cfg", None) or {}
        mean, std = config.get("mean"), config.get("std")
    return (mean, std) if mean and std else None


def display_pixels(model: Any, images: Float[Tensor, "b c h w"]) -> UInt8[Tensor, "b 3 h w"] | None:
    """Images with the normalization undone; None if they have neither one nor three channels.

    Where the normalization is not known, each image is stretched to 0..255.
    """
    if images.shape[1] not in (1, 3):
        return None
    statistics = known_normalization(model)
    if statistics is not None and len(statistics[0]) == images.shape[1]:
        seen = undo_normalization(images, *statistics)
    else:
        seen = images.detach().float()
        low = seen.amin(dim=(1, 2, 3), keepdim=True).clamp(max=0)
        high = seen.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1)
        seen = (seen - low) / (high - low)
    return (seen.nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
