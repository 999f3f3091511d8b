"""Methods that read attention and its gradient: a matrix per layer, how much token i takes from token j.

| name          | T^l (mean over heads h)                       | bare name     | source                  |
| raw_attention | A_h                                           | last block    |                         |
| rollout       | A_h                                           | Π (½ A + ½ I) | Abnar & Zuidema 2020    |
| attn_grad     | ∂y/∂A_h                                       | block 0       | equations.md#attn-grad  |
| attcam        | w_hi A_hij, w_hi = mean_j (patches) ∂y/∂A_hij | last block    | Chefer 2021 "GradCAM"   |
| genatt (gae)  | (A_h ⊙ ∂y/∂A_h)⁺                              | R ← R + T R   | Chefer et al. 2021, GAE |
| gradsam       | the same                                      | Σ_l T^l       | = genatt+plus           |

A is (B, heads, queries, keys) after softmax; the row that feeds the head is read: the class row, the mean
of the patch rows for average-pooled heads, or the pooling's own attention as one more layer.

Formulas: docs/equations.md#raw-attention, docs/equations.md#rollout, docs/equations.md#attcam,
docs/equations.md#gae.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.methods.registry import METHODS, Alias, register_method
from steadygaze.trace.capture import Trace

NEEDS = {"attention": True}


def global_attention(vit: Any) -> str:
    """Why a model has no attention matrix over all tokens; empty if it has."""
    if vit.plan.global_attention:
        return ""
    return (
        f"a {vit.plan.kind} has no attention matrix over all tokens (windows, reduced keys). "
        f"Use a gradient or CAM method."
    )


def identity_like(m: Float[Tensor, "b n n"]) -> Float[Tensor, "n n"]:
    return torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)


def add_identity(m: Float[Tensor, "b n n"], **own: Any) -> Float[Tensor, "b n n"]:
    """R ← R + T R."""
    return m + identity_like(m)


def half_identity(m: Float[Tensor, "b n n"], **own: Any) -> Float[Tensor, "b n n"]:
    """½ A + ½ I."""
    return 0.5 * m + 0.5 * identity_like(m)


@register_method(
    "raw_attention",
    "matrix",
    family="attention",
    aggregator="last",
    gradient=False,
    needs=NEEDS,
    unsupported=global_attention,
    rollout_step=half_identity,
    pool_residual=(0.5, 0.5),
)
def raw_attention(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """Attention of the last block, mean over heads."""
    return trace.weights(layer).mean(1)


@register_method(
    "rollout",
    "matrix",
    family="attention",
    aggregator="rollout",
    gradient=False,
    needs=NEEDS,
    unsupported=global_attention,
    rollout_step=half_identity,
    pool_residual=(0.5, 0.5),
)
def rollout(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """Attention rolled out over all blocks: Π (½ A + ½ I)."""
    return trace.weights(layer).mean(1)


def _attn_grad(a: Tensor, g: Tensor) -> Tensor:
    return g.mean(1)


@register_method(
    "attn_grad",
    "matrix",
    family="attention",
    aggregator="first",
    needs=NEEDS,
    unsupported=global_attention,
    fuse_heads=_attn_grad,
)
def attn_grad(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """Gradient with respect to the attention of block 0, signed."""
    return _attn_grad(*trace.attention(layer))


def _attcam(a: Tensor, g: Tensor, *, prefix: int = 0, **own: Any) -> Tensor:
    return (a * g[..., prefix:].mean(-1, keepdim=True)).mean(1)


def _positive(m: Tensor, *, relu: bool = False) -> Tensor:
    return m.relu() if relu else m


@register_method(
    "attcam",
    "matrix",
    family="attention",
    aggregator="last",
    needs=NEEDS,
    unsupported=global_attention,
    rollout_step=_positive,
    read_row=_positive,  # the row that feeds the head is read before its negative part is dropped
    fuse_heads=_attcam,
)
def attcam(trace: Trace, layer: int, *, relu: bool = False) -> Float[Tensor, "b n n"]:
    """Attention of the last block, heads weighted by their mean gradient (relu=True: as Chefer et al. do)."""
    return _attcam(*trace.attention(layer), prefix=trace.vit.prefix)


class _MeanPositive(torch.autograd.Function):
    """The mean over heads of (A_h ⊙ G_h)⁺ with constant G, head by head: no temporary of A's size.

    Since A ≥ 0, its gradient is G⁺ / H times that of the mean.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        total = torch.mul(a[:, 0], g[:, 0]).relu_()
        product = torch.empty_like(total)
        for h in range(1, a.shape[1]):
            total += torch.mul(a[:, h], g[:, h], out=product).relu_()
        return total.div_(a.shape[1])

    @staticmethod
    def backward(ctx: Any, g_mean: Tensor) -> tuple[Tensor, None]:
        (g,) = ctx.saved_tensors
        return g.relu().mul_((g_mean / g.shape[1]).unsqueeze(1)), None


def _genatt(a: Tensor, g: Tensor) -> Tensor:
    if a.requires_grad and not g.requires_grad:  # a loss of the map, to first order
        return _MeanPositive.apply(a, g)
    return (a * g).relu_().mean(1)


@register_method(
    "genatt",
    "matrix",
    family="attention",
    aggregator="rollout",
    needs=NEEDS,
    unsupported=global_attention,
    rollout_step=add_identity,
    fuse_heads=_genatt,
)
def genatt(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """Generic attention explainability (GAE): positive attention x gradient, R + A R over all blocks."""
    return _genatt(*trace.attention(layer))


METHODS.add(
    "gae",
    Alias("genatt", summary="Relevance map of Chefer et al. 2021 and 2022; an alias of genatt."),
    origin=__name__,
)
METHODS.add(
    "gradsam",
    Alias("genatt+plus", summary="Positive attention x gradient summed over the blocks."),
    origin=__name__,
)
