"""Losses on the gradient of the image, baselines of the relevance loss: GradMask and RRR.

Equations: docs/equations.md#gradmask (Simpson et al. 2019) and docs/equations.md#rrr (Ross et al. 2017).

    L = weight · (background · L_bg + classification · L_cls),   L_cls = cross-entropy with the label
    GradMask:  L_bg = mean ((∂y_label/∂image) S̄)²
    RRR:       L_bg = Σ ((∂ Σ_k log(p_k + 1e-11)/∂image) S̄)²       a sum over the whole step, not a mean

form: "formula" differentiates the gradient again, so that L_bg trains the weights; "code" is what the authors
of the relevance loss ran as a baseline, where L_bg is a number without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import UnknownNameError
from steadygaze.trace import Seam, Want
from steadygaze.training.losses.registry import (
    Loss,
    LossBatch,
    LossOptions,
    NonNegative,
    class_logits,
    model_outputs,
    register_loss,
)
from steadygaze.training.losses.relevance import (
    Terms,
    checked_labels,
    gradients_enabled,
    object_and_background,
)
from steadygaze.vit.view import ViT


@dataclass(frozen=True)
class PublishedWeights:
    """Weights and learning rate of a baseline, as the authors of the relevance loss published them."""

    classification: float
    background: float
    learning_rate: float


PresetName = Literal["ViT-B", "AR-S", "AR-B", "DeiT-S", "DeiT-B"]
RRR: dict[PresetName, PublishedWeights] = {
    "ViT-B": PublishedWeights(2e-6, 1e-10, 2e-6),
    "AR-S": PublishedWeights(2e-8, 1e-8, 1e-5),
    "AR-B": PublishedWeights(2e-7, 1e-8, 5e-7),
    "DeiT-S": PublishedWeights(2e-6, 1e-10, 1e-5),
    "DeiT-B": PublishedWeights(2e-6, 1e-10, 5e-6),
}
GRADMASK: dict[PresetName, PublishedWeights] = {
    "ViT-B": PublishedWeights(3e-9, 50.0, 2e-4),
    "AR-S": PublishedWeights(3e-9, 50.0, 5e-4),
    "AR-B": PublishedWeights(3e-9, 50.0, 1e-5),
    "DeiT-S": PublishedWeights(3e-9, 50.0, 5e-3),
    "DeiT-B": PublishedWeights(3e-9, 50.0, 1e-3),
}


def input_gradient_pass(
    loss: str,
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    masks: Tensor,
    labels: Int[Tensor, " b"],
    *,
    form: str = "formula",
    reverse: str = "reference",
) -> tuple[Terms, Any]:
    """Compute the terms background and classification, unweighted, in one pass over the model.

    Args:
        loss: "gradmask" or "rrr".
        masks: See `object_and_background`, which also explains `reverse`.

    Returns:
        The terms by name, and the outputs of the same pass for other losses.
    """
    if form not in ("formula", "code"):
        raise UnknownNameError("form", str(form), ("formula", "code"))
    _, background, counted = object_and_background(masks, images, reverse=reverse)
    pixels = images.detach().requires_grad_()
    second_order = form == "formula"
    seam = Seam(want=Want(hidden=False, attention=second_order))  # the fused kernel has no double backward
    seam.lenient = True
    with gradients_enabled(loss):
        with seam:
            outputs = model_outputs(model(pixels))
        y = class_logits(outputs)
        labels = checked_labels(labels, y)
        if loss == "gradmask":
            quantity = y.gather(1, labels[:, None]).sum()
        else:
            quantity = (y.softmax(-1) + 1e-11).log().sum()
        (g,) = torch.autograd.grad(quantity, pixels, retain_graph=True, create_graph=second_order)
    squares = (g * background[:, None]).pow(2).sum()
    l_background = squares / (counted.sum() * images.shape[1]) if loss == "gradmask" else squares
    return {"background": l_background, "classification": F.cross_entropy(y, labels)}, outputs


class InputGradientOptions(LossOptions):
    """Weights and form of GradMask or RRR; preset: the published weights for a model, in place of these."""

    background: NonNegative = 1.0
    classification: NonNegative = 1.0
    form: Literal["formula", "code"] = "formula"
    preset: PresetName | None = None
    reverse: Literal["complement", "reference"] = "reference"

    @property
    def published(self) -> Mapping[PresetName, PublishedWeights]:
        raise NotImplementedError

    @property
    def term_weights(self) -> Mapping[str, float]:
        weights = self if self.preset is None else self.published[self.preset]
        return {"background": weights.background, "classification": weights.classification}


class GradMaskOptions(InputGradientOptions):
    @property
    def published(self) -> Mapping[PresetName, PublishedWeights]:
        return GRADMASK


class RRROptions(InputGradientOptions):
    @property
    def published(self) -> Mapping[PresetName, PublishedWeights]:
        return RRR


class _InputGradient(Loss):
    terms = ("background", "classification")
    needs_masks = True
    runs_model = True
    tasks = ("classification",)
    options: InputGradientOptions

    def __call__(self, batch: LossBatch) -> Terms:
        assert batch.masks is not None
        options = self.options.model_dump(include={"form", "reverse"})
        terms, outputs = input_gradient_pass(
            self.name, batch.model, batch.images, batch.masks, batch.labels, **options
        )
        batch.share(outputs)
        return terms


@register_loss("gradmask", options=GradMaskOptions)
class GradMask(_InputGradient):
    """Penalizes the gradient of the label's logit on background pixels (Simpson et al. 2019)."""


@register_loss("rrr", options=RRROptions)
class RightForTheRightReasons(_InputGradient):
    """Penalizes the gradient of the summed log-probabilities on background pixels (Ross et al. 2017)."""

    def __call__(self, batch: LossBatch) -> Terms:
        terms = super().__call__(batch)
        return terms | {"background": self.setup.pieces * terms["background"]}  # a sum over the whole step
