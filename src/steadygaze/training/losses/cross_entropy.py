"""Cross-entropy with labels, soft targets or label maps: what a recipe trains with if it lists no loss."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from steadygaze.data.label_maps import IGNORED
from steadygaze.training.losses.registry import Loss, LossBatch, LossOptions, LossSetup, register_loss


def cross_entropy(
    logits: Float[Tensor, "b c *hw"], labels: Tensor, *, smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Mean over images for classes (B,) or class shares (B, C), over labeled pixels for label maps.

    If a step is divided into micro-batches, each one averages over its own labeled pixels.
    """
    if labels.dim() != 3:
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return total / (labels != IGNORED).sum().clamp_min(1)


class CrossEntropyOptions(LossOptions):
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


@register_loss("cross_entropy", options=CrossEntropyOptions)
class CrossEntropy(Loss):
    """Cross-entropy with the labels, with label smoothing; over labeled pixels in segmentation."""

    on_features = True
    options: CrossEntropyOptions

    def __init__(self, options: CrossEntropyOptions, setup: LossSetup) -> None:
        super().__init__(options, setup)
        self.label_smoothing = options.smoothing

    def __call__(self, batch: LossBatch) -> Tensor:
        outputs = batch.outputs
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        if batch.soft_targets is not None:  # mixup has smoothed them already
            return cross_entropy(logits, batch.soft_targets)
        return cross_entropy(logits, batch.labels, smoothing=self.options.smoothing)
