"""Beyond Intuition (Chen et al. 2023, "Rethinking Token Attributions inside Transformers").

    P ← P + O^l P from P = I, over the blocks l ≥ first      what a token holds of the others (perception)
    F_ij = mean_h (mean_k ∂T/∂A^{L−1}_hij (k/K · image))⁺    what the class takes of it (reasoning feedback)
    s_j = Σ_i w_i F_ij P_ij

| form  | O^l                                                                                |
| head  | Σ_h I_h A_h, I_h ∝ mean_ij \\|A_hᵀ ∂T/∂A_h\\|, Σ_h I_h = 1                           |
| token | mean_h A_hij · ‖W_o v_j‖ / ‖x_j‖, x_j the block's input, v_j the values of all heads |

| symbol | variable                                                                          |
| P      | `perception`                                                                      |
| F      | `feedback`, K is `steps`                                                          |
| w      | the row that feeds the head: the class token, or the mean of the patches          |

Attention pooling is one more block whose only row is its query: F is taken from it, and P is O P without the
identity (form "token": mean_h A_h). The authors' code starts at block 3 (head) and 5 (token), and has the
integral at k/(K − 1) from k = 0; first = 0 and k = 1..K follow the package txv. Formula:
docs/equations.md#beyond-intuition.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.methods.aggregate import align_pooling
from steadygaze.methods.attention import global_attention
from steadygaze.methods.registry import METHODS, Alias, register_method
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want
from steadygaze.vit.view import ViT

FORMS = ("head", "token")


def supported(vit: ViT, form: str = "head") -> str:
    """Why a model is not supported; empty if it is."""
    why = global_attention(vit)
    if not why and form == "token" and any(block.parts is None for block in vit.blocks):
        return f"form='token' needs pre-norm blocks with one attention; a {vit.plan.kind} has other blocks."
    return why


def by_heads(a: Float[Tensor, "b h q k"], g: Float[Tensor, "b h q k"]) -> Float[Tensor, "b q k"]:
    """Σ_h I_h A_h."""
    importance = (a.transpose(-1, -2) @ g).abs().mean((-1, -2))
    share = importance / importance.sum(1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    return torch.einsum("bh,bhqk->bqk", share, a)


def by_tokens(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """mean_h A_hij ‖W_o v_j‖ / ‖x_j‖."""
    block, seen, x = trace.vit.blocks[layer], trace.mixing(layer), trace.run.hidden[layer]
    assert block.parts is not None and seen.v is not None
    parts = block.parts()
    x = x if parts.before is None else parts.before(x)
    sent = seen.v.transpose(1, 2).flatten(2) @ parts.output.T
    ratio = sent.norm(dim=-1) / x.norm(dim=-1).clamp_min(torch.finfo(x.dtype).tiny)
    return (trace.weights(layer).mean(1) * ratio[:, None]).detach()


@register_method(
    "beyond_intuition", "model", family="attention", gradient=True, cost=42.0, unsupported=supported
)
def beyond_intuition(
    query: Query, *, form: str = "head", steps: int = 20, first: int = 0
) -> Float[Tensor, "b h w"]:
    """Rollout of weighted heads or tokens, times integrated gradients of the last attention."""
    vit, depth = query.vit, len(query.vit.blocks)
    if form not in FORMS:
        raise UnknownNameError("form", str(form), FORMS)
    if steps < 1 or not 0 <= first < depth:
        raise InputError(
            f"beyond_intuition: expected steps >= 1 and first=0..{depth - 1}, got {steps} and {first}"
        )
    heads = form == "head"
    run = forward(
        vit,
        query.tokens,
        rules=query.rules,
        want=Want(hidden=False, attention=True, value=not heads),
        start=first,
        watch=first,
        grad=heads,
    )
    trace = run.trace(query.value(run.logits) if heads else None)
    perception = torch.eye(query.tokens.shape[1]).to(query.tokens).expand(len(query.images), -1, -1)
    for layer in range(first, depth):
        mixed = by_heads(*trace.attention(layer)) if heads else by_tokens(trace, layer)
        perception = perception + mixed @ perception
    if vit.readout == "pool" and trace.pooling:
        last = trace.pooling[-1]
        a = last.a.detach()
        row = by_heads(a, trace.grad(last.a)) if heads else a.mean(1)
        perception = align_pooling(trace, row) @ perception
    feedback = integrated_feedback(query, steps)
    weights = trace.readout_row() if perception.shape[1] > 1 else perception.new_ones(1, 1)
    scores = torch.einsum("bi,bij,bij->bj", weights.expand(len(perception), -1), feedback, perception)
    return scores[:, vit.prefix :].unflatten(1, query.grid)


def integrated_feedback(query: Query, steps: int) -> Float[Tensor, "b q n"]:
    """F, of the last block's attention or of the pooling's."""
    vit, last = query.vit, len(query.vit.blocks) - 1
    total: Tensor | float = 0.0
    for k in range(1, steps + 1):
        tokens = vit.embed(query.images * (k / steps))
        want = Want(hidden=False, attention=True)
        run = forward(vit, tokens, rules=query.rules, want=want, start=last, watch=last)
        trace = run.trace(query.value(run.logits))
        pooled = vit.readout == "pool" and bool(trace.pooling)
        total = total + (trace.grad(trace.pooling[-1].a) if pooled else trace.attention(last)[1])
    assert isinstance(total, Tensor)
    feedback = (total / steps).relu().mean(1)
    return align_pooling(trace, feedback) if pooled else feedback


METHODS.add(
    "beyond_intuition_token",
    Alias(
        "beyond_intuition:form=token", summary="The same with tokens weighted by the norm of their values."
    ),
    origin=__name__,
)
