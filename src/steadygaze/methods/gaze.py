"""Past `gaze` (NUMERICS 13): the same frozen-linear backward pass, read twice.

    s_j = Σ_l ⟨x^l_j − mean over patches of x^l, ∂T/∂x^l_j⟩      what the patch sends, the part shared by all patches removed
    q_j = Σ_l Σ_h Σ_{i≠j} ∂T/∂S^l_hij                            first-order effect of the key j: S are the attention logits
    F   = z(z(s) + 0.4 z(q)),  z = z-score over the patches

| name       | map                                                                                              | cost in forwards |
| gaze_keys  | F                                                                                                | 2                |
| gaze_twice | F + 0.35 · F of the patch's own part, where the best 70 % of patches and the rest are run alone    | 4                |
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.methods.attention import global_attention
from steadygaze.registry import register
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.seam import Want

KEYS, OWN_PART, BEST = 0.4, 0.35, 0.7


def z(x: Float[Tensor, "b p"]) -> Float[Tensor, "b p"]:
    """z-score over the patches; zeros where all are alike."""
    return (x - x.mean(1, keepdim=True)) / x.std(1, unbiased=False, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def sent(trace: Trace) -> Float[Tensor, "b p"]:
    """s_j over all layers."""
    total: Any = 0
    for l in range(trace.depth):
        x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(l))
        total = total + ((x - x.mean(1, keepdim=True)) * g).sum(-1)
    return total


def taken(trace: Trace) -> Float[Tensor, "b p"]:
    """q_j over all layers and heads."""
    total: Any = 0
    for l in range(trace.depth):
        a, g = trace.attention(l)
        ds = a * (g - (a * g).sum(-1, keepdim=True))  # softmax's Jacobian
        total = total + (ds.sum(-2) - ds.diagonal(dim1=-2, dim2=-1)).sum(1)
    return total[:, trace.vit.prefix :]


def _evidence(ask: Any, tokens: Tensor) -> Float[Tensor, "b p"]:
    """F of the patches that `tokens` has."""
    run = forward(ask.vit, tokens, rules=ask.rules, want=Want(attention=True))
    trace = run.trace(ask.value(run.logits))
    return z(z(sent(trace)) + KEYS * z(taken(trace)))


@register("gaze_keys", "whole", family="decomposition", freeze=0.75, score="log_odds", serves=global_attention)
def gaze_keys(ask: Any) -> Float[Tensor, "b h w"]:
    """gaze with the part shared by all patches removed, and the effect of each key beside it."""
    return _evidence(ask, ask.tokens).unflatten(1, ask.grid)


def _removable(vit: Any) -> str:
    return global_attention(vit) or ("" if vit.plan.removable else f"patches of a {vit.plan.kind} cannot be removed.")


@register("gaze_twice", "whole", family="decomposition", freeze=0.75, score="log_odds", serves=_removable, cost=4.0)
def gaze_twice(ask: Any) -> Float[Tensor, "b h w"]:
    """gaze_keys on the whole image, and again on its best patches and on the rest, each alone."""
    whole = _evidence(ask, ask.tokens)
    order = whole.argsort(dim=1, descending=True, stable=True)
    best = round(BEST * order.shape[1])
    second = torch.zeros_like(whole)
    for part in (order[:, :best], order[:, best:]):
        second = second.scatter(1, part, _evidence(ask, ask.vit.select(ask.tokens, part)))
    return (whole + OWN_PART * second).unflatten(1, ask.grid)
