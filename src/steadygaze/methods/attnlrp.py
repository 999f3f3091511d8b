"""AttnLRP (Achtibat et al. 2024): relevance as input x gradient under rules of its own (trace/rules.py).

| name          | map                                                                              |
| attnlrp       | ⟨x^l, g^l⟩: operands of a product share by half, softmax's own gradient, σ held  |
| attnlrp_gamma | the same down to the pixels, with the γ rule on every linear map and convolution |

The γ rule of y = W x + b favors what has the sign of y: positive parts are weighted by 1 + γ where y > 0,
negative ones where y < 0, and what they add up to is scaled back to y. In terms of gradients:

    r = g ⊙ y / ((1 + γ/2) y + (γ/2) sign(y) (|W| |x| + |b|))
    ∂T/∂x = (1 + γ/2) Wᵀ r + (γ/2) sign(x) ⊙ |W|ᵀ (sign(y) ⊙ r)

Formulas: docs/equations.md#attnlrp, docs/equations.md#gamma-rule.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.methods.gradient import ixg
from steadygaze.methods.registry import Options, register_method
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.rules import ATTNLRP, Rules
from steadygaze.trace.seam import Seam
from steadygaze.vit.intercept import TorchFunction

ATTENTION = ("shared", "held")


def _check_gamma(name: str, options: Options) -> None:
    for key in ("gamma", "conv_gamma"):
        if not 0 <= options.get(key, 0.0) < float("inf"):
            raise InputError(
                f"{name}: {key} weighs positive contributions, a number >= 0, got {options[key]!r}"
            )


def _rules(options: Options) -> Rules:
    gamma = float(options.get("gamma", 0.0))
    return replace(ATTNLRP, gamma=gamma, conv_gamma=gamma)


@register_method(
    "attnlrp",
    "map",
    family="propagation",
    aggregator="first",
    rules=_rules,
    check_options=_check_gamma,
    input_x_gradient=True,
)
def attnlrp(trace: Trace, layer: int, *, gamma: float = 0.0) -> Float[Tensor, "b h w"]:
    """AttnLRP: relevance through attention and softmax, as input x modified gradient.

    Args:
        gamma: γ of every linear map and convolution of the blocks and the head; 0 leaves the rule out.
    """
    return ixg(trace, layer)


@register_method(
    "attnlrp_gamma",
    "model",
    family="propagation",
    rules=ATTNLRP,
    check_options=_check_gamma,
    cost=4.0,
)
def attnlrp_gamma(
    query: Query, *, gamma: float = 0.05, conv_gamma: float = 100.0, attention: str = "shared"
) -> Float[Tensor, "b h w"]:
    """AttnLRP with the γ rule down to the pixels, summed over each patch: the authors' setting for ViTs.

    Args:
        gamma: γ of linear maps.
        conv_gamma: γ of convolutions.
        attention: "shared" as in `attnlrp`, or "held" (no relevance for queries and keys, as in the authors'
            code for ViTs).
    """
    if attention not in ATTENTION:
        raise UnknownNameError("attention", attention, ATTENTION)
    rules = replace(query.rules, gamma=float(gamma), conv_gamma=float(conv_gamma))
    if attention == "held":
        rules = replace(rules, attention=0.0, value=1.0)
    with torch.enable_grad():
        images = query.images.detach().requires_grad_()
        with _Embedding(rules) as embedding:
            tokens = query.vit.embed(images)
        run = forward(query.vit, tokens, rules=rules, cut=False)
        pixels = images if embedding.pixels is None else embedding.pixels
        (g,) = torch.autograd.grad(query.value(run.logits).sum(), pixels)
    return query.per_patch(pixels.detach() * g, "pixels")


class _Embedding(Seam):
    """Keeps the pixels as the first convolution sees them: a normalization in front of it changes no map."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.pixels: Tensor | None = None
        self.intercept("convolution", F.conv2d)

    def convolution(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.pixels is None:
            self.pixels = x
        return super().convolution(func, x, *args, **kwargs)
