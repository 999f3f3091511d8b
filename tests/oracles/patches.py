"""Patch-wise augmentation of RVT, patch by patch, from draws that are given."""

import torch
import torch.nn.functional as F
from torch import Tensor


def augmented_patch(patch: Tensor, side: int, top: int, left: int, noise: Tensor, flipped: bool) -> Tensor:
    """One patch (C, p, p): crop and resize, add noise, flip."""
    p = patch.shape[-1]
    crop = patch[:, top : top + side, left : left + side]
    resized = F.interpolate(crop[None], size=(p, p), mode="bilinear", align_corners=True)[0] + noise
    out = torch.empty_like(resized)
    for column in range(p):
        out[:, :, column] = resized[:, :, p - 1 - column if flipped else column]
    return out


def augmented_images(
    images: Tensor, draws: list[dict], p: int, mean: list[float], std: list[float]
) -> Tensor:
    """Images (B, C, H, W) whose patches, row by row, are augmented by `draws`, within the range of images."""
    out, number = torch.empty_like(images), 0
    batch, channels, height, width = images.shape
    for b in range(batch):
        for i in range(0, height, p):
            for j in range(0, width, p):
                out[b, :, i : i + p, j : j + p] = augmented_patch(
                    images[b, :, i : i + p, j : j + p], **draws[number]
                )
                number += 1
    for c in range(channels):
        out[:, c] = out[:, c].clamp((0 - mean[c]) / std[c], (1 - mean[c]) / std[c])
    return out
