"""Extensions of `gaze`: the same frozen-linear backward pass, read in two ways.

Equations: docs/equations.md#gaze-removal, docs/equations.md#gaze-halves, docs/equations.md#gaze-twice.

    s^l_j = ⟨x^l_j, ∂T/∂x^l_j⟩                             contribution of patch j at layer l; gaze: Σ_l s^l_j
    q^l_j = Σ_h Σ_{i≠j} ∂T/∂S^l_hij                        attention of others to it; S: attention logits
          = Σ_h Σ_{i≠j} A_hij (G_hij − Σ_k A_hik G_hik)    G = ∂T/∂A
    p_j   = ⟨x^L_j − mean over patches of x^L, ∂T/∂x^L_j⟩  the same for a head that reads the patches, else 0

With w_j the weight of key j before the rows of A are normalized, q^l_j is ∂T/∂w_j at w_j = 1.

| name         | map                                                                               | passes |
| gaze_removal | Σ_l (s^l / L + q^l) + p                                                           | 2      |
| gaze_halves  | r + ¼ · r with the better half of the patches alone, and with the other half alone | 5      |
| gaze_twice   | F + 0.35 · F with the best 70 % of patches alone, and with the other patches alone | 5      |

r is gaze_removal.

F = z(z(s̃) + 0.4 z(Σ_l q^l)), where s̃ is Σ_l s^l with the mean patch subtracted from x^l, and z is the
z-score.

Σ_l s^l / L and Σ_l q^l + p are two first-order estimates of the loss in T when patch j is removed: the mean
over layers of setting its state to zero, and removing it as a key of every layer at once. Both are in units
of T, so they are added.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.methods.attention import global_attention
from steadygaze.methods.registry import register_method
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want
from steadygaze.vit.view import ViT

KEYS, OWN_PART, BEST = 0.4, 0.35, 0.7
OWN_HALF = 0.25


def taken(trace: Trace, layer: int) -> Float[Tensor, "b p"]:
    """q^l_j."""
    return trace.key_effects(layer)[:, trace.vit.prefix :]


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
    needs={"keys": True},
)
def gaze_removal(trace: Trace, layer: int) -> Float[Tensor, "b h w"]:
    """First-order effect of removing a patch: its own contribution (gaze) and the attention it receives.

    Models without attention over all tokens (windows, reduced keys) have no q and p: the map is gaze / L.
    """
    x, g = trace.patches(layer)
    sent = (x * g).sum(-1) / trace.depth
    if not trace.vit.plan.global_attention:
        return sent
    effect = taken(trace, layer)
    if layer == trace.depth - 1:
        effect = effect + pooled(trace)
    return sent + effect.unflatten(1, sent.shape[1:])


def removal_effects(query: Query, tokens: Tensor) -> Float[Tensor, "b p"]:
    """`gaze_removal` of the patches in `tokens`."""
    run = forward(query.vit, tokens, rules=query.rules, want=Want(keys=True))
    trace = run.trace(query.value(run.logits))
    total = pooled(trace)
    for l in range(trace.depth):
        x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(l))
        total = total + (x * g).sum(-1) / trace.depth + taken(trace, l)
    return total


def z(x: Float[Tensor, "b p"]) -> Float[Tensor, "b p"]:
    """z-score over the patches; zeros where all are equal."""
    deviation = x.std(1, unbiased=False, keepdim=True)
    return (x - x.mean(1, keepdim=True)) / deviation.clamp_min(torch.finfo(x.dtype).tiny)


def sent(trace: Trace) -> Float[Tensor, "b p"]:
    """s̃_j."""
    total = trace.logits.new_zeros(())
    for l in range(trace.depth):
        x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(l))
        total = total + ((x - x.mean(1, keepdim=True)) * g).sum(-1)
    return total


def _evidence(query: Query, tokens: Tensor) -> Float[Tensor, "b p"]:
    """F of the patches in `tokens`."""
    run = forward(query.vit, tokens, rules=query.rules, want=Want(keys=True))
    trace = run.trace(query.value(run.logits))
    keys = torch.stack([taken(trace, l) for l in range(trace.depth)]).sum(0)
    return z(z(sent(trace)) + KEYS * z(keys))


def _removable(vit: ViT) -> str:
    fixed = "" if vit.plan.removable else f"patches of a {vit.plan.kind} cannot be removed."
    return global_attention(vit) or fixed


@register_method(
    "gaze_twice",
    "model",
    family="decomposition",
    freeze=0.75,
    score="log_odds",
    unsupported=_removable,
    cost=5.0,
)
def gaze_twice(query: Query) -> Float[Tensor, "b h w"]:
    """Contributions of patches in the whole image, in its most relevant patches and in the others alone."""
    whole = _evidence(query, query.tokens)
    order = whole.argsort(dim=1, descending=True, stable=True)
    best = round(BEST * order.shape[1])
    if best in (0, order.shape[1]):
        raise MethodUnavailableError(
            f"gaze_twice: expected at least 2 patches, to divide them in two parts, got {order.shape[1]}. "
            "Use gaze_removal."
        )
    second = torch.zeros_like(whole)
    for part in (order[:, :best], order[:, best:]):
        second = second.scatter(1, part, _evidence(query, query.vit.select(query.tokens, part)))
    return (whole + OWN_PART * second).unflatten(1, query.grid)


@register_method(
    "gaze_halves",
    "model",
    family="decomposition",
    freeze=0.75,
    score="log_odds",
    unsupported=_removable,
    cost=5.0,
)
def gaze_halves(query: Query, *, weight: float = OWN_HALF) -> Float[Tensor, "b h w"]:
    """`gaze_removal` of the whole image, and of its more relevant half and its other half alone.

    Args:
        weight: Weight of what was measured in a patch's own half.
    """
    whole = removal_effects(query, query.tokens)
    order = whole.argsort(dim=1, descending=True, stable=True)
    half = order.shape[1] // 2
    if not half:
        raise MethodUnavailableError(
            "gaze_halves: expected at least 2 patches, to divide them in two halves, got 1. Use gaze_removal."
        )
    own_half = torch.zeros_like(whole)
    for part in (order[:, :half], order[:, half:]):
        effects = removal_effects(query, query.vit.select(query.tokens, part))
        own_half = own_half.scatter(1, part, effects)
    return (whole + weight * own_half).unflatten(1, query.grid)
