"""Label maps counted: confusion by picture, intersection over union by class (IoU), and their mean (mIoU).

| symbol | variable |
| --- | --- |
| n_tp, pixels of class t that are said to be p | `confusion[..., t, p]` |
| IoU_c = n_cc / (Σ_p n_cp + Σ_t n_tc − n_cc) | `iou` |
| mIoU = mean of IoU_c over the classes that are in the truth or in the answer | `miou` |

A data set's mIoU is that of its SUMMED counts, as PASCAL VOC and Cityscapes define it, not the mean over pictures.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput

IGNORED = 255  # the value of pixels that count for nothing


def confusion(
    predicted: Int[Tensor, "b h w"], truth: Tensor, classes: int, *, ignored: int = IGNORED
) -> Int[Tensor, "b c c"]:
    """How many pixels of each true class (rows) are said to be of each class (columns), picture by picture.

    >>> confusion(torch.tensor([[[0, 1]]]), torch.tensor([[[0, 255]]]), 2).tolist()
    [[[1, 0], [0, 0]]]
    """
    if predicted.dim() != 3 or predicted.shape != truth.shape:
        raise BadInput(
            f"expected label maps (B, H, W) of one size, got {tuple(predicted.shape)} and {tuple(truth.shape)}"
        )
    counted = truth != ignored
    for name, labels in (("predicted", predicted), ("truth", truth[counted])):
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise BadInput(
                f"{name}: expected classes 0..{classes - 1}{f', and {ignored} where nothing counts' if name == 'truth' else ''}, "
                f"got {int(labels.min())}..{int(labels.max())}"
            )
    picture = torch.arange(len(predicted), device=predicted.device).view(-1, 1, 1)
    places = (picture * classes + truth.long()) * classes + predicted.long()
    found = torch.bincount(places[counted], minlength=len(predicted) * classes**2)
    return found.view(len(predicted), classes, classes)


def overlaps(counts: Int[Tensor, "*b c c"]) -> Int[Tensor, "*b 3 c"]:
    """Pixels of each class that are right, that are said to be of it, and that truly are: all that IoU needs."""
    return torch.stack([counts.diagonal(dim1=-2, dim2=-1), counts.sum(-2), counts.sum(-1)], -2)


def iou_of(right: Any, said: Any, true: Any) -> Any:
    """right / (said + true − right), NaN where a class is in neither; of tensors or arrays."""
    union = said + true - right
    return right / union if isinstance(union, Tensor) else _divided(right, union)


def _divided(a: Any, b: Any) -> Any:
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        return a / b


def iou(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b c"]:
    """Intersection over union of each class, 0..1, higher is better; NaN for a class that is neither in the truth nor in the answer.

    >>> iou(torch.tensor([[3, 1], [0, 4]])).tolist()
    [0.75, 0.800000011920929]
    """
    return iou_of(*overlaps(counts).unbind(-2))


def miou(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b"]:
    """Mean of `iou` over the classes that are there, 0..1, higher is better."""
    return iou(counts).nanmean(-1)


def pixel_accuracy(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b"]:
    """Share of the counted pixels whose class is right, 0..1, higher is better."""
    return counts.diagonal(dim1=-2, dim2=-1).sum(-1) / counts.sum((-2, -1))
