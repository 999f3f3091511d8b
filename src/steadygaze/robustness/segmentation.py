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

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.data.label_maps import (
    IGNORED,
    confusion,
    iou,
    miou,
    overlaps,
    pixel_accuracy,
)
from steadygaze.questions.regions import scores_of
from steadygaze.vit.contexts import evaluation_mode

__all__ = [
    "IGNORED",
    "confusion",
    "iou",
    "label_map",
    "miou",
    "overlaps",
    "pixel_accuracy",
    "scores_of",
]


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
