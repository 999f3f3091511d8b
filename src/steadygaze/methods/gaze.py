"""Extensions of `gaze`: the same frozen-linear backward pass, read in two ways.

Equations: docs/equations.md#gaze-removal, docs/equations.md#gaze-weighted, docs/equations.md#gaze-halves,
docs/equations.md#gaze-twice.

    s^l_j = ⟨x^l_j, ∂T/∂x^l_j⟩                             contribution of patch j at layer l; gaze: Σ_l s^l_j
    q^l_j = Σ_h Σ_{i≠j} ∂T/∂S^l_hij                        attention of others to it; S: attention logits
          = Σ_h Σ_{i≠j} A_hij (G_hij − Σ_k A_hik G_hik)    G = ∂T/∂A
    p_j   = ⟨x^L_j − mean over patches of x^L, ∂T/∂x^L_j⟩  the same for a head that reads the patches, else 0

With k_j the weight of key j before the rows of A are normalized, q^l_j is ∂T/∂k_j at k_j = 1.

| name          | map                                                                                | cost  |
| gaze_removal  | Σ_l (s^l / L + q^l) + p                                                            | 2     |
| gaze_weighted | Σ_l w_l (s^l / L + q^l) + p,    w_l = min(1, c / a_l)², a_l = Σ_j |s^l_j| / |T|    | 2     |
| gaze_outline  | (e + W e) / 2,    e = gaze_weighted of T = y_c − ½ log Σ_{k≠c} exp y_k             | 2     |
| gaze_halves   | r + ¼ · r with the better half of the patches alone, and with the other half alone | 5     |
| gaze_twice    | F + 0.35 · F with the best 70 % of patches alone, and with the other patches alone | 5     |

r is gaze_removal; c is `limit`. For a class, |T| is at least 1, so that log-odds near 0 do not distrust every
layer. W_ij = softmax_j cos(x_i − x̄, x_j − x̄) / τ, x the patches at block L/4, x̄ their mean; W e is scaled to
the spread of e. Patches that look alike share their scores.

F = z(z(s̃) + 0.4 z(Σ_l q^l)), where s̃ is Σ_l s^l with the mean patch subtracted from x^l, and z is the
z-score.

Σ_l s^l / L and Σ_l q^l + p are two first-order estimates of the loss in T when patch j is removed: the mean
over layers of setting its state to zero, and removing it as a key of every layer at once. Both are in units
of T, so they are added.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.methods.attention import global_attention
from steadygaze.methods.registry import Options, register_alias, register_method
from steadygaze.trace.capture import Forward, Trace, forward
from steadygaze.trace.completeness import resize_map
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want
from steadygaze.trace.rules import Rules
from steadygaze.vit.view import ViT

KEYS, OWN_PART, BEST = 0.4, 0.35, 0.7
OWN_HALF = 0.25
LIMIT = 8.0  # chosen on the panel: docs/evidence/default.md


def _check_constants(name: str, options: Options) -> None:
    limit, keys = options.get("limit"), options.get("keys", 1.0)
    if limit is not None and (not isinstance(limit, (int, float)) or not limit > 0):
        raise InputError(f"{name}: limit: expected a number above 0, or None for no weights, got {limit!r}")
    if not isinstance(keys, (int, float)) or not keys >= 0:
        raise InputError(f"{name}: keys: expected a number from 0, got {keys!r}")


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
    check_options=_check_constants,
)
def gaze_removal(
    trace: Trace, layer: int, *, keys: float = 1.0, limit: float | None = None
) -> Float[Tensor, "b h w"]:
    """First-order effect of removing a patch: its own contribution (gaze) and the attention it receives.

    Models without attention over all tokens (windows, reduced keys) have no q and p: the map is gaze / L.

    Args:
        keys: Weight of q and p.
        limit: c of `gaze_weighted`; None is w_l = 1 for all layers.
    """
    x, g = trace.patches(layer)
    sent = (x * g).sum(-1)
    return effect_of(trace, layer, sent.flatten(1), keys, limit).unflatten(1, sent.shape[1:])


register_alias(
    "gaze_weighted",
    f"gaze_removal:limit={LIMIT:g}",
    score="log_odds",
    summary="gaze_removal with less weight for layers whose contributions far exceed what they explain.",
)


def effect_of(
    trace: Trace, layer: int, sent: Float[Tensor, "b p"], keys: float, limit: float | None
) -> Float[Tensor, "b p"]:
    """w_l (s^l / L + keys · q^l), and keys · p with the last layer; sent: s^l."""
    weight = trust(trace, sent, limit)
    effect = weight * sent / trace.depth
    if not trace.vit.plan.global_attention:
        return effect
    effect = effect + keys * weight * taken(trace, layer)
    return effect + keys * pooled(trace) if layer == trace.depth - 1 else effect


def trust(trace: Trace, sent: Float[Tensor, "b p"], limit: float | None) -> Float[Tensor, "b 1"]:
    """w_l of the layer with the contributions `sent`."""
    if limit is None:
        return sent.new_ones(len(sent), 1)
    assert trace.quantity is not None
    explained = trace.quantity.abs() if trace.target is None else trace.quantity.abs().clamp_min(1)
    amplified = sent.detach().abs().sum(1) / explained.clamp_min(torch.finfo(sent.dtype).tiny)
    return (limit / amplified.clamp_min(limit)).square()[:, None]


def removal_effects(query: Query, tokens: Tensor, keys: float, limit: float | None) -> Float[Tensor, "b p"]:
    """`gaze_removal` of the patches in `tokens`."""
    run = forward(query.vit, tokens, rules=query.rules, want=Want(keys=True))
    classes = query.target if isinstance(query.target, Tensor) else None
    trace = run.trace(query.value(run.logits), classes)
    total = trace.logits.new_zeros(())
    for l in range(trace.depth):
        x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(l))
        total = total + effect_of(trace, l, (x * g).sum(-1), keys, limit)
    return total


def _outline_pass(vit: ViT, tokens: Tensor, rules: Rules, *, first: int = 0, **_options: Any) -> Forward:
    """The forward pass of `gaze_outline`, with gradients from the first layer on."""
    if not 0 <= first < len(vit.blocks):
        raise InputError(f"gaze_outline: first={first}, but the model has layers 0..{len(vit.blocks) - 1}")
    return forward(vit, tokens, rules=rules, want=Want(keys=True), start=first, watch=first)


@register_method(
    "gaze_outline",
    "model",
    family="decomposition",
    freeze=0.75,
    score="log_odds",
    check_options=_check_constants,
    recorded=_outline_pass,
)
def gaze_outline(
    query: Query,
    *,
    limit: float = LIMIT,
    keys: float = 1.0,
    first: int = 0,
    against: float = 0.5,
    share: float = 0.5,
    temperature: float = 0.2,
) -> Float[Tensor, "b h w"]:
    """First-order effect of removing a patch, shared among patches that look alike; the default.

    Models without attention over all tokens have no q, p and W: the map is Σ_l w_l s^l / L.

    Args:
        limit: As for `gaze_removal`.
        keys: As for `gaze_removal`.
        first: First layer whose contributions are added.
        against: β: how much the other classes count if log-odds are explained; 0 is the logit.
        share: Weight of W e; 0 leaves it out.
        temperature: τ.
    """
    run = query.run
    assert run is not None  # `recorded` made it
    value = query.value(run.logits)
    classes = query.target if isinstance(query.target, Tensor) else None
    if classes is not None and query.score == "log_odds" and query.vit.plan.outputs == "classes":
        value = against * value + (1 - against) * run.logits.gather(1, classes[:, None])[:, 0]
    trace = run.trace(value, classes, retain=True)  # other targets follow
    maps = [gaze_removal(trace, l, keys=keys, limit=limit) for l in range(first, trace.depth)]
    effects = torch.stack([resize_map(m, query.grid) for m in maps]).sum(0)
    if not share or not query.vit.plan.global_attention:
        return effects
    x = trace.run.hidden[trace.depth // 4][:, trace.vit.prefix :].detach()
    unit = F.normalize(x - x.mean(1, keepdim=True), dim=-1)
    e = effects.flatten(1)
    alike = torch.einsum("bij,bj->bi", (unit @ unit.mT / temperature).softmax(-1), e)
    shared = z(alike) * e.std(1, unbiased=False, keepdim=True)
    return ((1 - share) * e + share * shared).unflatten(1, query.grid)


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
    check_options=_check_constants,
    cost=5.0,
)
def gaze_halves(
    query: Query, *, weight: float = OWN_HALF, keys: float = 1.0, limit: float | None = None
) -> Float[Tensor, "b h w"]:
    """`gaze_removal` of the whole image, and of its more relevant half and its other half alone.

    Args:
        weight: Weight of what was measured in a patch's own half.
        keys: As for `gaze_removal`.
        limit: As for `gaze_removal`.
    """
    whole = removal_effects(query, query.tokens, keys, limit)
    order = whole.argsort(dim=1, descending=True, stable=True)
    half = order.shape[1] // 2
    if not half:
        raise MethodUnavailableError(
            "gaze_halves: expected at least 2 patches, to divide them in two halves, got 1. Use gaze_removal."
        )
    own_half = torch.zeros_like(whole)
    for part in (order[:, :half], order[:, half:]):
        effects = removal_effects(query, query.vit.select(query.tokens, part), keys, limit)
        own_half = own_half.scatter(1, part, effects)
    return (whole + weight * own_half).unflatten(1, query.grid)
