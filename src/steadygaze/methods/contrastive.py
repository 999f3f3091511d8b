"""Methods that were made for CLIP: LeGrad and Grad-ECLIP. Both serve ordinary classifiers too.

| name       | map                                                           | source                 |
| legrad     | Σ_l mean over heads h and queries i of (∂s^l/∂A^l_hij)⁺       | Bousselham et al. 2025 |
| grad_eclip | (λ_j Σ_c w_c v_jc)⁺, w = ∂T/∂o of the row that feeds the head | Zhao et al. 2024       |

s^l is the target's score if the head were given the mean of the tokens behind block l; with attention
pooling, the pool reads the tokens behind block l, and A is the pool's. o = A v is the output of the last
attention before its projection, over all heads; λ_j = minmax_j cos(q, k_j).

Formulas: docs/equations.md#legrad, docs/equations.md#grad-eclip.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.methods.aggregate import min_max
from steadygaze.methods.attention import global_attention
from steadygaze.methods.registry import register_method
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want
from steadygaze.trace.seam import Seam
from steadygaze.vit.view import ViT, remember


def _one_layer_read(vit: ViT) -> str:
    why = global_attention(vit)
    if not why and vit.plan.reads_layers:
        return f"it scores each layer alone, but the head of a {vit.plan.kind} reads several."
    return why


@register_method("legrad", "model", family="attention", unsupported=_one_layer_read)
def legrad(query: Query, *, layers: int = 0) -> Float[Tensor, "b h w"]:
    """LeGrad: positive gradients of each layer's own score at its attention.

    Args:
        layers: Number of last layers to use (the authors' code: 2); 0 uses all of them, as in the paper.
    """
    vit, depth = query.vit, len(query.vit.blocks)
    if not isinstance(layers, int) or not 0 <= layers <= depth:
        raise InputError(f"legrad: layers must be an integer from 0 (all) to {depth}, got {layers!r}")
    start = depth - (layers or depth)
    run = forward(vit, query.tokens, rules=query.rules, want=Want(attention=True), start=start, watch=start)
    layout, total = run.layout, torch.zeros_like(query.tokens[:, vit.prefix :, 0])
    for layer in range(start, depth):
        z = run.hidden[layer + 1]
        seam = Seam(query.rules, Want(attention=True))
        with torch.enable_grad(), seam:
            record = seam.next_record()
            pooled = z if vit.readout == "pool" else _mean_token(vit, z).expand_as(z)
            score = query.value(vit.head(remember(pooled, layout)))  # s^l
        attentions = record.attention if vit.readout == "pool" else run.records[layer].attention
        for a in [attention.a for attention in attentions]:
            (g,) = torch.autograd.grad(score.sum(), a, retain_graph=True, allow_unused=True)
            if g is not None:
                total = total + g.clamp(min=0).mean((1, 2))[:, -total.shape[1] :]
    return total.unflatten(1, layout.grid)


def _mean_token(vit: ViT, z: Float[Tensor, "b n d"]) -> Float[Tensor, "b 1 d"]:
    """The mean of all tokens; where the head weighs patches, as for a region, theirs with these weights."""
    weights = vit.plan.readout_weights
    if weights is None:
        return z.mean(1, keepdim=True)
    return (weights.to(z)[:, None] * z[:, vit.prefix :]).sum(1, keepdim=True)


@register_method(
    "grad_eclip",
    "map",
    family="cam",
    aggregator="last",
    needs={"query": True},
    unsupported=global_attention,
    differentiable=False,
)
def grad_eclip(
    trace: Trace, layer: int, *, keys: bool = True, project: bool = False
) -> Float[Tensor, "b h w"] | None:
    """Grad-ECLIP: values weighted by the gradient at the attention's output, and by cos(q, k) of the keys.

    keys=False leaves the keys out; project=True takes cos(q, k) behind the output projection, as the authors'
    code for CLIP does. For averaged patches, all rows that feed the head are added; attention pooling is the
    last layer of a model that has it.
    """
    vit = trace.vit
    pooled = vit.readout == "pool"
    if pooled and layer < trace.depth - 1:
        return None  # only the pooling has a row that feeds the head
    attention = trace.pooling[-1] if pooled else trace.run.records[layer].attention[-1]
    if attention.q is None or attention.k is None or attention.v is None or attention.out is None:
        raise MethodUnavailableError(
            f"grad_eclip: q, k and v of a {vit.plan.kind} cannot be identified. Use legrad."
        )
    rows = [0] if pooled else trace.readout_row()[0].nonzero()[:, 0].tolist()
    height, width = trace.run.layout.grid
    patches = height * width
    w = _over_heads(trace.grad(attention.out))[:, rows]  # ∂T/∂o
    v = _over_heads(attention.v)[:, -patches:]
    scores = torch.einsum("bic,bjc->bij", w, v)
    if keys:
        q, k = _over_heads(attention.q)[:, rows], _over_heads(attention.k)[:, -patches:]
        if project and not pooled:
            q, k = (_projected(trace, layer, x) for x in (q, k))
        scores = scores * _key_weights(q, k)
    return scores.sum(1).relu().unflatten(1, (height, width))


def _key_weights(q: Float[Tensor, "b i c"], k: Float[Tensor, "b j c"]) -> Float[Tensor, "b i j"]:
    """λ_ij: cos(q_i, k_j), scaled to 0..1 over the patches j."""
    cosine = torch.einsum("bic,bjc->bij", F.normalize(q, dim=-1), F.normalize(k, dim=-1))
    return min_max(cosine, (-1,))


def _projected(trace: Trace, layer: int, x: Float[Tensor, "b n hd"]) -> Float[Tensor, "b n d"]:
    """x behind the output projection of the block's attention."""
    make = trace.vit.blocks[layer].parts
    if make is None or make().inner_norm is not None:
        raise MethodUnavailableError("grad_eclip: project=True needs an attention with one output projection")
    parts = make()
    y = x @ parts.output.T
    return y if parts.output_bias is None else y + parts.output_bias


def _over_heads(x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n hd"]:
    """The vectors of all heads, one after the other."""
    return x.detach().transpose(1, 2).flatten(2)
