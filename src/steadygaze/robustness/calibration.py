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

BINS = 15


@dataclass(frozen=True)
class Calibration:
    """ece and confidence in 0..1; the bins of a reliability diagram: number of images, mean confidence,
    accuracy (NaN: empty)."""

    ece: float
    confidence: float
    accuracy: float
    count: Int[Tensor, " m"]
    bin_confidence: Float[Tensor, " m"]
    bin_accuracy: Float[Tensor, " m"]


def confidences(logits: Float[Tensor, "b classes"]) -> Float[Tensor, " b"]:
    """Probability of the predicted class, (B,)."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"expected logits (B, classes), floating point, got {got}")
    return logits.softmax(-1, dtype=torch.float64).amax(1)


def reliability(logits: Float[Tensor, "b classes"], right: Tensor, *, bins: int = BINS) -> Calibration:
    """ECE and mean confidence; `right` (B,) are the labels, or booleans if more than one label may be
    correct.

    >>> logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]])  # the second prediction is wrong
    >>> round(reliability(logits, torch.tensor([0, 0])).ece, 3)
    0.482
    """
    sure = confidences(logits)
    if not isinstance(right, Tensor) or right.shape != sure.shape or not len(sure):
        got = getattr(right, "shape", type(right).__name__)
        raise InputError(f"right: expected {len(sure)} labels or booleans, at least one, got {got}")
    ok = right if right.dtype == torch.bool else logits.argmax(1) == right
    return reliability_of(sure, ok, bins=bins)


def reliability_of(sure: Float[Tensor, " b"], right: Tensor, *, bins: int = BINS) -> Calibration:
    """The same from confidences in 0..1 and whether each prediction was correct, as a run stores them.

    >>> round(reliability_of(torch.tensor([0.9, 0.9]), torch.tensor([True, False])).ece, 3)
    0.4
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise InputError(f"bins: expected a whole number of 1 or more, got {bins!r}")
    if sure.dim() != 1 or sure.shape != right.shape or not len(sure):
        raise InputError(
            "expected one confidence and one label for each image, "
            f"got {tuple(sure.shape)} and {tuple(right.shape)}"
        )
    sure, ok = sure.double(), right.double()
    if not bool(((sure >= 0) & (sure <= 1)).all()):
        raise InputError(
            f"expected confidences in 0..1, got {float(sure.min()):.3g}..{float(sure.max()):.3g}"
        )
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=sure.device)
    bin_index = (torch.bucketize(sure, edges) - 1).clamp(0, bins - 1)
    count = torch.bincount(bin_index, minlength=bins)
    total_sure = torch.zeros(bins, dtype=torch.float64, device=sure.device).index_add_(0, bin_index, sure)
    total_right = torch.zeros_like(total_sure).index_add_(0, bin_index, ok)
    gap = (total_right - total_sure).abs().sum() / len(sure)
    return Calibration(
        float(gap), float(sure.mean()), float(ok.mean()), count, total_sure / count, total_right / count
    )
