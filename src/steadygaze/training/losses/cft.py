"""Concept-guided fine-tuning (CFT): maps that lie on the concepts of a class (Elisha et al. 2026).

Equations: docs/equations.md#cft.

    L = weight · (alignment · (context · L_ctx + concept · L_con) + accuracy · L_acc)
    L_ctx = mean BCE(r̂ S̄, 0)      L_con = mean BCE(r̂ S, S)      L_acc = cross-entropy of logits / temperature

| symbol | variable      | meaning                                                                   |
| S_k    | masks         | mask of concept k, (B, K, H, W)                                            |
| S, S̄   | s, background | union max_k S_k of the concepts, and what is outside, (B, H, W)            |
| r̂      | r             | the map, bilinear to the size of the image, scaled to 0..1 over its pixels |

It is the relevance loss with other penalties of a pixel and other weights: 0.8, 1.2, 0.5 and 0.2, those of
the authors' code. Map, first and second order: `relevance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.training.losses.registry import LossBatch, NonNegative, register_loss
from steadygaze.training.losses.relevance import MapOptions, Pixels, Relevance, Terms

LOG_0 = -100.0  # as in torch's binary cross-entropy


def _log(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """The logarithm, -100 and constant at 0.

    The smallest and the largest pixel of r̂ are 0 and 1 whatever the weights are, so their gradient is 0.
    torch's binary cross-entropy has 10¹² there, which cancels up to rounding only.
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).log().clamp_min(LOG_0), LOG_0)


def cross_entropies(r: Pixels, s: Pixels, background: Pixels, counted: Pixels) -> Terms:
    """L_ctx and L_con."""
    count, inside = counted.sum(), r * s
    return {
        "context": -_log(1 - r * background).sum() / count,
        "concept": -((s * _log(inside) + (1 - s) * _log(1 - inside)) * counted).sum() / count,
    }


class CFTOptions(MapOptions):
    """Weights of CFT."""

    alignment: NonNegative = 0.8
    accuracy: NonNegative = 0.2
    context: NonNegative = 1.2
    concept: NonNegative = 0.5

    @property
    def term_weights(self) -> Mapping[str, float]:
        return {
            "context": self.alignment * self.context,
            "concept": self.alignment * self.concept,
            "accuracy": self.accuracy,
        }


@register_loss("cft", options=CFTOptions)
class CFT(Relevance):
    """Moves attribution maps onto concepts of the class by binary cross-entropy (Elisha et al. 2026)."""

    terms = ("context", "concept", "accuracy")
    pixel_terms = staticmethod(cross_entropies)

    def __call__(self, batch: LossBatch) -> Terms:
        terms = super().__call__(batch)
        terms["accuracy"] = terms.pop("confidence")
        return terms
