"""Past `gaze` (docs/equations.md#gaze-removal, docs/equations.md#gaze-twice): the same frozen-linear backward pass, read twice.

    s^l_j = ⟨x^l_j, ∂T/∂x^l_j⟩                            what patch j sends from layer l on; `gaze` is Σ_l s^l_j
    q^l_j = Σ_h Σ_{i≠j} ∂T/∂S^l_hij                       what the others take of it: S are the attention logits. With w_j the weight
          = Σ_h Σ_{i≠j} A_hij (G_hij − Σ_k A_hik G_hik)   of key j before the rows are normalised, this is ∂T/∂w_j at w_j = 1; G = ∂T/∂A
    p_j   = ⟨x^L_j − mean over patches of x^L, ∂T/∂x^L_j⟩  the same for a head that reads the patches; 0 for a class token

| name         | map                                                                                          | passes |
| gaze_removal | Σ_l (s^l / L + q^l) + p                                                                      | 2      |
| gaze_twice   | F + 0.35 · F of the patch's own part, where the best 70 % of patches and the rest run alone    | 5      |
|              | F = z(z(s̃) + 0.4 z(Σ_l q^l)): s̃ is Σ_l s^l with the mean patch taken off x^l, z the z-score  |        |

Σ_l s^l / L and Σ_l q^l + p are two first-order answers to one question, how much of T is lost when patch j goes: the mean over the
layers of setting its state to zero there, and taking it out as a key of every layer at once. Both are in units of T, so they are added.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.method_registry import register_method
from steadygaze.methods.attention import global_attention
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.record import Want

KEYS, OWN_PART, BEST = 0.4, 0.35, 0.7


def taken(trace: Trace, layer: int) -> Float[Tensor, "b p"]:
    """q^l_j; the pooling p_j is counted to the last layer of `gaze_removal`, not here."""
    a, g = trace.attention(layer)
    product = a * g
    mean = product.sum(-1)  # Σ_k A_ik G_ik
    own = (product.diagonal(dim1=-2, dim2=-1) - a.diagonal(dim1=-2, dim2=-1) * mean).sum(1)
    every = product.sum((1, 2)) - torch.einsum("bhi,bhij->bj", mean, a)
    return (every - own)[:, trace.vit.prefix :]


def pooled(trace: Trace) -> Float[Tensor, "b p"]:
    """p_j."""
    x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(trace.depth))
    return ((x - x.mean(1, keepdim=True)) * g).sum(-1)


@register_method(
    "gaze_removal",
    "map",
    family="decomposition",
    aggregator="plus",
    freeze=0.75,
    score="log_odds",
    needs={"attention": True},
)
def gaze_removal(trace: Trace, layer: int) -> Float[Tensor, "b h w"]:
    """What is lost when a patch goes, to first order: what it sends (gaze) and what the others take of it.

    Models without attention over all tokens (windows, reduced keys) have no such q and p: there it is gaze, divided by L.
    """
    x, g = trace.patches(layer)
    sent = (x * g).sum(-1) / trace.depth
    if not trace.vit.plan.global_attention:
        return sent
    effect = taken(trace, layer)
    if layer == trace.depth - 1:
        effect = effect + pooled(trace)
    return sent + effect.unflatten(1, sent.shape[1:])


def z(x: Float[Tensor, "b p"]) -> Float[Tensor, "b p"]:
    """z-score over the patches; zeros where all are alike."""
    return (x - x.mean(1, keepdim=True)) / x.std(1, unbiased=False, keepdim=True).clamp_min(
        torch.finfo(x.dtype).tiny
    )


def sent(trace: Trace) -> Float[Tensor, "b p"]:
    """s̃_j."""
    total: Any = 0
    for l in range(trace.depth):
        x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(l))
        total = total + ((x - x.mean(1, keepdim=True)) * g).sum(-1)
    return total


def _evidence(ask: Any, tokens: Tensor) -> Float[Tensor, "b p"]:
    """F of the patches that `tokens` has."""
    run = forward(ask.vit, tokens, rules=ask.rules, want=Want(attention=True))
    trace = run.trace(ask.value(run.logits))
    keys = torch.stack([taken(trace, l) for l in range(trace.depth)]).sum(0)
    return z(z(sent(trace)) + KEYS * z(keys))


def _removable(vit: Any) -> str:
    return global_attention(vit) or (
        "" if vit.plan.removable else f"patches of a {vit.plan.kind} cannot be removed."
    )


@register_method(
    "gaze_twice",
    "model",
    family="decomposition",
    freeze=0.75,
    score="log_odds",
    unsupported=_removable,
    cost=5.0,
)
def gaze_twice(ask: Any) -> Float[Tensor, "b h w"]:
    """What is sent and what is taken, of the whole image, and again of its best patches and of the rest, each alone."""
    whole = _evidence(ask, ask.tokens)
    order = whole.argsort(dim=1, descending=True, stable=True)
    best = round(BEST * order.shape[1])
    second = torch.zeros_like(whole)
    for part in (order[:, :best], order[:, best:]):
        second = second.scatter(1, part, _evidence(ask, ask.vit.select(ask.tokens, part)))
    return (whole + OWN_PART * second).unflatten(1, ask.grid)
