"""Confusion matrices of label maps, intersection over union by class (IoU), and its mean (mIoU).

Equations: docs/equations.md#miou.

| symbol | variable |
| --- | --- |
| n_tp, number of pixels of class t that are predicted as p | `confusion[..., t, p]` |
| IoU_c = n_cc / (Σ_p n_cp + Σ_t n_tc − n_cc) | `iou` |
| mIoU, mean of IoU_c over the classes that occur in the truth or in the prediction | `miou` |

The mIoU of a data set is that of its SUMMED counts, as PASCAL VOC and Cityscapes define it, not the mean over
images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput

IGNORED = 255  # value of pixels that are not counted


def confusion(
    predicted: Int[Tensor, "b h w"], truth: Tensor, num_classes: int, *, ignored: int = IGNORED
) -> Int[Tensor, "b c c"]:
    """Number of pixels of each true class (rows) that are predicted as each class (columns), for every image.

    >>> confusion(torch.tensor([[[0, 1]]]), torch.tensor([[[0, 255]]]), 2).tolist()
    [[[1, 0], [0, 0]]]
    """
    if predicted.dim() != 3 or predicted.shape != truth.shape:
        raise BadInput(
            "expected label maps (B, H, W) of one size, "
            f"got {tuple(predicted.shape)} and {tuple(truth.shape)}"
        )
    counted = truth != ignored
    for name, labels in (("predicted", predicted), ("truth", truth[counted])):
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            exception = f", and {ignored} for pixels that are not counted" if name == "truth" else ""
            raise BadInput(
                f"{name}: expected classes 0..{num_classes - 1}{exception}, "
                f"got {int(labels.min())}..{int(labels.max())}"
            )
    image = torch.arange(len(predicted), device=predicted.device).view(-1, 1, 1)
    cells = (image * num_classes + truth.long()) * num_classes + predicted.long()
    counts = torch.bincount(cells[counted], minlength=len(predicted) * num_classes**2)
    return counts.view(len(predicted), num_classes, num_classes)


def overlaps(counts: Int[Tensor, "*b c c"]) -> Int[Tensor, "*b 3 c"]:
    """Number of pixels of each class that are correct, predicted, and true: all that IoU needs."""
    return torch.stack([counts.diagonal(dim1=-2, dim2=-1), counts.sum(-2), counts.sum(-1)], -2)


def iou_from_counts(correct: Any, predicted: Any, true: Any) -> Any:
    """correct / (predicted + true − correct), NaN for a class that does not occur; of tensors or arrays."""
    union = predicted + true - correct
    if isinstance(union, Tensor):
        return correct / union
    with np.errstate(invalid="ignore", divide="ignore"):
        return correct / union


def iou(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b c"]:
    """Intersection over union of each class, 0..1, higher is better; NaN for a class that does not occur.

    >>> iou(torch.tensor([[3, 1], [0, 4]])).tolist()
    [0.75, 0.800000011920929]
    """
    values: Tensor = iou_from_counts(*overlaps(counts).unbind(-2))
    return values


def miou(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b"]:
    """Mean of `iou` over the classes that occur, 0..1, higher is better.

    >>> round(miou(torch.tensor([[3, 1], [0, 4]])).item(), 3)  # rows: true class; columns: predicted class
    0.775
    """
    return iou(counts).nanmean(-1)


def pixel_accuracy(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b"]:
    """Share of the counted pixels whose class is correct, 0..1, higher is better.

    >>> pixel_accuracy(torch.tensor([[3, 1], [0, 4]])).item()
    0.875
    """
    return counts.diagonal(dim1=-2, dim2=-1).sum(-1) / counts.sum((-2, -1))


iou_of = iou_from_counts
