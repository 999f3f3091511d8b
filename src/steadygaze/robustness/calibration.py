"""Expected calibration error: confidence against accuracy (Guo et al., arXiv:1706.04599).

    ECE = Σ_m |B_m| / n · |accuracy(B_m) − confidence(B_m)|

with 15 bins of equal width; B_m holds the confidences in ((m−1)/15, m/15].

0 is perfect, lower is better. Confidence is the largest probability. torchmetrics puts an exact 1.0 into a
bin of its own; here it belongs to the last one, as in the paper.

Formulas: docs/equations.md#ece.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.robustness.protocols import BINS


@dataclass(frozen=True)
class Calibration:
    """Calibration of a model.

    Args:
        ece (float): expected calibration error in 0..1; lower is better.
        confidence (float): mean confidence in 0..1.
        accuracy (float): fraction of correct predictions.
        count (Tensor): number of images in each bin of the reliability diagram.
        bin_confidence (Tensor): mean confidence of each bin; NaN where it is empty.
        bin_accuracy (Tensor): accuracy of each bin; NaN where it is empty.
    """

    ece: float
    confidence: float
    accuracy: float
    count: Int[Tensor, " m"]
    bin_confidence: Float[Tensor, " m"]
    bin_accuracy: Float[Tensor, " m"]


def confidences(logits: Float[Tensor, "b classes"]) -> Float[Tensor, " b"]:
    """Return the probability of the predicted class, (B,), in float64."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InputError(f"expected logits (B, classes), got {logits.dtype} {tuple(logits.shape)}")
    return logits.softmax(-1, dtype=torch.float64).amax(1)


def reliability(logits: Float[Tensor, "b classes"], right: Tensor, *, bins: int = BINS) -> Calibration:
    """Measure the calibration of logits: ECE, mean confidence and the bins of a reliability diagram.

    Args:
        logits (Tensor): (B, classes).
        right (Tensor): (B,), the labels, or booleans if more than one label may be correct.
        bins (int): number of bins of equal width.

    Returns:
        Calibration: lower ECE is better.

    Examples:
        >>> logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]])  # the second prediction is wrong
        >>> round(reliability(logits, torch.tensor([0, 0])).ece, 3)
        0.482
    """
    sure = confidences(logits)
    if right.shape != sure.shape:
        raise InputError(f"right: expected {len(sure)} labels or booleans, got {tuple(right.shape)}")
    ok = right if right.dtype == torch.bool else logits.argmax(1) == right
    return reliability_of(sure, ok, bins=bins)


def reliability_of(sure: Float[Tensor, " b"], right: Tensor, *, bins: int = BINS) -> Calibration:
    """Measure the calibration of confidences in 0..1, from whether each prediction was correct.

    Examples:
        >>> round(reliability_of(torch.tensor([0.9, 0.9]), torch.tensor([True, False])).ece, 3)
        0.4
    """
    if bins < 1:
        raise InputError(f"bins: expected 1 or more, got {bins!r}")
    if sure.dim() != 1 or sure.shape != right.shape or not len(sure):
        shapes = f"{tuple(sure.shape)} and {tuple(right.shape)}"
        raise InputError(f"expected one confidence and one label for each image, at least one, got {shapes}")
    sure, ok = sure.double(), right.double()
    if not ((sure >= 0) & (sure <= 1)).all():
        raise InputError(f"expected confidences in 0..1, got {sure.min():.3g}..{sure.max():.3g}")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=sure.device)
    bin_index = (torch.bucketize(sure, edges) - 1).clamp(0, bins - 1)
    count = torch.bincount(bin_index, minlength=bins)
    total_sure = torch.zeros(bins, dtype=torch.float64, device=sure.device).index_add_(0, bin_index, sure)
    total_right = torch.zeros_like(total_sure).index_add_(0, bin_index, ok)
    gap = (total_right - total_sure).abs().sum() / len(sure)
    return Calibration(
        float(gap), float(sure.mean()), float(ok.mean()), count, total_sure / count, total_right / count
    )
