"""Segmentation under corruption: predicted classes of pixels, mean mIoU, and the share of it that is kept.

Counts and IoU are those of `data.label_maps`; images are corrupted by `corruptions.corrupt`.

| protocol | corruptions | severities | mean |
| --- | --- | --- | --- |
| `"all"` | every one that is given | every one that is given | over corruptions of the mean over severities |
| `"cityscapes-c"` | the 16 of Cityscapes-C | noise 1 to 3, others 1 to 5 | the same |

Cityscapes-C: Kamann & Rother 2020; Xie et al. 2021 (SegFormer).

Formulas: docs/equations.md#miou.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.data.datasets.imagenet import CORRUPTIONS
from steadygaze.data.label_maps import (
    IGNORED,
    confusion,
    iou,
    iou_from_counts,
    miou,
    overlaps,
    pixel_accuracy,
)
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.questions.regions import scores_of
from steadygaze.vit.contexts import evaluation_mode

__all__ = [
    "CITYSCAPES_C",
    "IGNORED",
    "NOISE",
    "confusion",
    "iou",
    "iou_from_counts",
    "label_map",
    "mean_miou",
    "miou",
    "overlaps",
    "pixel_accuracy",
    "retention",
    "scores_of",
]

NOISE = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise")
CITYSCAPES_C = (
    "motion_blur",
    "defocus_blur",
    "glass_blur",
    "gaussian_blur",
    *NOISE,
    "brightness",
    "contrast",
    "saturate",
    "jpeg_compression",
    "snow",
    "spatter",
    "fog",
    "frost",
)
PROTOCOLS = ("all", "cityscapes-c")
Protocol = Literal["all", "cityscapes-c"]


def label_map(model: nn.Module, images: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b h w"]:
    """The predicted class of every pixel, from a segmenter's scores at the image's size (bilinear).

    The model is left as it was.

    An image with scores that are not finite has no prediction: -1 everywhere.

    Examples:
        >>> import steadygaze as sg
        >>> model = sg.modules.segmenter(sg.load_model("embedded").model, classes=2)
        >>> label_map(model, torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 32, 32])
    """
    with torch.no_grad(), evaluation_mode(model):
        scores = scores_of(model(images))
    return torch.cat(
        [_largest(image_scores, (images.shape[-2], images.shape[-1])) for image_scores in scores.split(1)]
    )  # all at once would fill the memory


def _largest(scores: Float[Tensor, "1 c h w"], size: tuple[int, int]) -> Int[Tensor, "1 H W"]:
    if not torch.isfinite(scores).all():
        return torch.full((1, *size), -1, device=scores.device)
    if tuple(scores.shape[-2:]) != size:
        scores = F.interpolate(scores, size=size, mode="bilinear", align_corners=False)
    return scores.argmax(1)


def mean_miou(found: Mapping[str, Mapping[int, Any]], protocol: Protocol = "all") -> Any:
    """Mean of the mIoU over corruptions.

    Args:
        found: mIoU by corruption and severity: a number, or an array of resampled ones.

    Examples:
        >>> mean_miou({"fog": {1: 0.75, 5: 0.25}, "shot_noise": {1: 0.5, 5: 0.0}}, "cityscapes-c")
        0.5
    """
    if protocol not in PROTOCOLS:
        raise UnknownNameError("protocol", str(protocol), PROTOCOLS)
    parts = []
    for name, by_severity in found.items():
        if name not in CORRUPTIONS:
            raise UnknownNameError("corruption", name, CORRUPTIONS)
        if protocol == "cityscapes-c" and name not in CITYSCAPES_C:
            continue
        kept = [v for s, v in by_severity.items() if protocol == "all" or name not in NOISE or s <= 3]
        if kept:
            parts.append(sum(kept) / len(kept))
    if not parts:
        raise InputError(
            f"mean_miou: no corruption and severity of the protocol {protocol!r} "
            f"is among {', '.join(found) or 'nothing'}"
        )
    return sum(parts) / len(parts)


def retention(corrupted: Any, clean: Any) -> Any:
    """Share of the clean mIoU that is left under corruption; higher is better, 1 if nothing is lost.

    Examples:
        >>> retention(0.375, 0.5)
        0.75
    """
    return corrupted / clean
