"""The relevance loss: maps that lie on the object, and a confident prediction (Chefer et al. 2022).

Equations: docs/equations.md#relevance-losses and docs/equations.md#second-order.

    L = weight · (relevance · (background · L_bg + foreground · L_fg) + confidence · L_cls)
    L_bg = mean (r̂ S̄)²      L_fg = mean (r̂ S − S)²      L_cls = cross-entropy of logits / temperature

| symbol | variable      | meaning                                                                   |
| r̂      | r             | the map, bilinear to the size of the image, scaled to 0..1 over its pixels |
| S, S̄   | s, background | object and background, (B, H, W)                                           |

The paper's weights of L_bg, L_fg and L_cls are 1.6, 0.24 and 0.2: the defaults of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.explainer import rules_of
from steadygaze.method_registry import Method
from steadygaze.methods import parse
from steadygaze.target import resolve_target
from steadygaze.trace import PLAIN
from steadygaze.training.losses.differentiable_map import differentiable_map
from steadygaze.training.losses.object_masks import object_and_background
from steadygaze.training.losses.outputs import class_logits
from steadygaze.training.losses.registry import (
    Loss,
    LossBatch,
    LossOptions,
    LossSetup,
    NonNegative,
    Positive,
    register_loss,
)
from steadygaze.vit import ViT, adapt

Terms = dict[str, Tensor]


def relevance_terms(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    masks: Tensor,
    labels: Int[Tensor, " b"] | None = None,
    *,
    method: str | Method = "gae",
    explained: str = "label",
    confidence: str = "predicted",
    second_order: bool = False,
    temperature: float = 1.0,
    reverse: str = "reference",
) -> Terms:
    """background, foreground and confidence, unweighted, from one pass over the model.

    masks: see `object_and_background`, which also explains `reverse`
    method: what makes the map
    explained: the class the map is of, "label" or "predicted"
    confidence: the class made more certain, "predicted" (the paper) or "label"
    second_order: differentiate the gradient inside the map too
    """
    terms, _ = relevance_pass(
        model,
        images,
        masks,
        labels,
        method=method,
        explained=explained,
        confidence=confidence,
        second_order=second_order,
        temperature=temperature,
        reverse=reverse,
    )
    return terms


def relevance_pass(
    model: nn.Module | ViT,
    images: Tensor,
    masks: Tensor,
    labels: Tensor | None,
    *,
    method: str | Method = "gae",
    explained: str = "label",
    confidence: str = "predicted",
    second_order: bool = False,
    temperature: float = 1.0,
    reverse: str = "reference",
) -> tuple[Terms, Any]:
    """The terms of `relevance_terms`, and the outputs of the same pass for other losses."""
    for key, value in (("explained", explained), ("confidence", confidence)):
        if value not in ("label", "predicted"):
            raise UnknownName(key, str(value), ("label", "predicted"))
    if labels is None and "label" in (explained, confidence):
        raise BadInput(
            "relevance: expected labels. Give them, or explained='predicted' and confidence='predicted'."
        )
    if not temperature > 0:
        raise BadInput(f"relevance: temperature must be above 0, got {temperature}")
    s, background, counted = object_and_background(masks, images, reverse=reverse)
    target = labels if explained == "label" else None
    with gradients_enabled("relevance"):
        scores, outputs = differentiable_map(model, images, target, method, second_order=second_order)
    r = to_pixels(scores, (images.shape[-2], images.shape[-1]))
    y = class_logits(outputs)
    certain = checked_labels(labels, y) if confidence == "label" else y.detach().argmax(-1)
    count = counted.sum()
    terms = {
        "background": (r * background).pow(2).sum() / count,
        "foreground": (r * s - s).pow(2).sum() / count,
        "confidence": F.cross_entropy(y / temperature, certain),
    }
    return terms, outputs


@contextmanager
def gradients_enabled(loss: str) -> Iterator[None]:
    """Gradients for losses made of gradients, also under torch.no_grad(), which then gives their value
    alone."""
    if torch.is_inference_mode_enabled():
        raise BadInput(
            f"{loss}: it takes gradients inside, which torch.inference_mode() forbids. "
            "Use torch.no_grad() for its value."
        )
    with torch.enable_grad():
        yield


def checked_labels(labels: Any, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
    """The labels, one class index for each image; anything else is an error."""
    classes = None if labels is None else resolve_target(labels, logits)
    if classes is None or classes.dim() != 1:
        raise BadInput(f"labels: expected one class for each of {len(logits)} images, got {labels!r}")
    return classes


def to_pixels(scores: Float[Tensor, "b gh gw"], size: tuple[int, int]) -> Float[Tensor, "b h w"]:
    """A map at the size of the image (bilinear), scaled to 0..1 over each image; an all-zero map stays
    zero."""
    r = F.interpolate(scores[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    low, high = r.amin((1, 2), keepdim=True), r.amax((1, 2), keepdim=True)
    return (r - low) / (high - low).clamp_min(1e-12)


class RelevanceOptions(LossOptions):
    """Weights and forms of the relevance loss; `confident_of` is the class made more certain."""

    relevance: NonNegative = 0.8
    confidence: NonNegative = 0.2
    background: NonNegative = 2.0
    foreground: NonNegative = 0.3
    method: str = "gae"
    explained: Literal["label", "predicted"] = "label"
    confident_of: Literal["predicted", "label"] = "predicted"
    second_order: bool = False
    temperature: Positive = 1.0
    reverse: Literal["complement", "reference"] = "reference"

    @property
    def term_weights(self) -> Mapping[str, float]:
        return {
            "background": self.relevance * self.background,
            "foreground": self.relevance * self.foreground,
            "confidence": self.confidence,
        }


@register_loss("relevance", options=RelevanceOptions)
class Relevance(Loss):
    """Moves attribution maps onto the object and keeps predictions confident (Chefer et al. 2022)."""

    terms = ("background", "foreground", "confidence")
    needs_masks = True
    runs_model = True
    tasks = ("classification",)
    options: RelevanceOptions

    def __init__(self, options: RelevanceOptions, setup: LossSetup) -> None:
        super().__init__(options, setup)
        self.vit = adapt(setup.model)

    def __call__(self, batch: LossBatch) -> Terms:
        assert batch.masks is not None
        o = self.options
        method = parse(o.method)
        own_rules = method.base.gradient and rules_of(method) != PLAIN
        # The attention that the map keeps is that of the model itself, unless the method changes the pass by
        # its rules.
        with nullcontext() if own_rules else batch.observed():
            terms, outputs = relevance_pass(
                self.vit,
                batch.images,
                batch.masks,
                batch.labels,
                method=o.method,
                explained=o.explained,
                confidence=o.confident_of,
                second_order=o.second_order,
                temperature=o.temperature,
                reverse=o.reverse,
            )
        batch.share(outputs)
        return terms
