"""Rules: what is held constant when a gradient is taken (docs/equations.md#frozen-linear).

The forward value never changes. Each rule holds in reverse mode (`backward`) and in forward mode (`jvp`,
which the offsets of whole blocks need).

| field     | held constant, or scaled                                     | DecompX | `gaze` | AttnLRP |
| attention | factor of the gradient to q and k through A (1 − α)          | 0       | 1/4    | 1/4     |
| value     | factor of the gradient to v                                  | 1       | 1      | 1/2     |
| norm      | σ of every norm                                              | held    | held   | held    |
| unit      | ‖x‖ of x / ‖x‖, unit length (CLIP, SigLIP)                   | held    | held   | held    |
| slope     | activation f(h) = s·h with s = f(h)/h held                   | held    | held   | held    |
| gate      | products of two branches (SwiGLU, gated attention): the gate | held    | held   | 1/2     |
| gamma     | γ rule of linear maps, conv_gamma of convolutions            | 0       | 0      | 0; ≥ 0  |

The γ rule of a linear map (docs/equations.md#gamma-rule): with y = W x + b, the contributions W_ij x_j and
b_i of output i are weighted by 1 + γ where they have the sign of y_i, and by 1 otherwise; D_i is their sum.
Relevance y_i g_i is shared in proportion. As a⁺ = (|a| + a) / 2, one more product, with |W|, gives both
halves:

    D = (1 + γ/2) y + (γ/2) sign(y) (|W| |x| + |b|),      r = g ⊙ y / D, 0 where y = 0
    dx = (1 + γ/2) Wᵀ r + (γ/2) sign(x) ⊙ |W|ᵀ (sign(y) ⊙ r)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

Map = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> y


class _Gamma(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: float, apply: Map, y: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, y)
        ctx.gamma, ctx.function = gamma, apply
        return y.clone()  # the model may change it in place; the backward pass needs y itself

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, y = ctx.saved_tensors
        half, sign = ctx.gamma / 2, y.sign()
        size, absolute_back = _with_transpose(
            ctx.function, x.abs(), weight.abs(), None if bias is None else bias.abs()
        )
        divisor = (1 + half) * y + half * sign * size
        r = torch.where(y == 0, torch.zeros_like(g), g * y / torch.where(y == 0, torch.ones_like(y), divisor))
        _, back = _with_transpose(ctx.function, x, weight, None)
        dx = (1 + half) * back(r) + half * x.sign() * absolute_back(sign * r)
        return dx, None, None, None, None, None


def _with_transpose(
    apply: Map, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The map's value at x, and the transpose of its linear part."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = apply(leaf, weight, bias)

    def back(r: Tensor) -> Tensor:
        return torch.autograd.grad(y, leaf, r)[0]

    return y.detach(), back


def gamma_map(gamma: float, func: Any, x: Tensor, weight: Tensor, *how: Any, **more: Any) -> Tensor:
    """F.linear or F.conv2d with the γ rule in its backward pass; without it where γ is 0.

    Args:
        how: Further positional arguments of `func`: bias, stride, padding and so on.
        more: Further keyword arguments of `func`.
    """
    if not gamma or not x.requires_grad:
        return func(x, weight, *how, **more)
    bias: Tensor | None = more.pop("bias", how[0] if how else None)

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return func(x, weight, bias, *how[1:], **more)

    with torch.no_grad():
        y = apply(x, weight, bias)
    return _Gamma.apply(x, weight, bias, gamma, apply, y)


@dataclass(frozen=True)
class Rules:
    """One setting of what a backward pass holds constant. `Rules()` is the ordinary gradient."""

    attention: float = 1.0
    value: float = 1.0
    norm: bool = False
    unit: bool = False
    slope: bool = False
    gate: Literal["free", "held", "half"] = "free"
    gamma: float = 0.0
    conv_gamma: float = 0.0


PLAIN = Rules()
ATTNLRP = Rules(attention=0.25, value=0.5, norm=True, unit=True, slope=True, gate="half")


def frozen(
    freeze: float = 1.0,
    slope: Literal["origin", "tangent"] = "origin",
    gate: Literal["held", "half"] = "held",
) -> Rules:
    """Frozen-linear rules: freeze=1 holds attention constant (DecompX), 0 leaves its gradient unchanged.

    gate="half" with freeze=1 are the rules of LibraGrad.
    """
    return Rules(attention=1.0 - freeze, norm=True, unit=True, slope=slope == "origin", gate=gate)


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.factor, None


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """x, with its gradient multiplied by `factor`."""
    if factor == 1.0:
        return x
    if factor == 0.0:
        return x.detach()
    value, tangent = forward_ad.unpack_dual(x)  # a tangent there is only in forward mode
    y = _ScaleGrad.apply(value, factor)
    return y if tangent is None else forward_ad.make_dual(y, tangent * factor)


class _HeldNorm(torch.autograd.Function):
    """Layer norm whose σ is a constant: dx = (γg − mean(γg)) / σ. Parameters get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(rstd, weight)
        ctx.save_for_forward(rstd, weight)
        ctx.axes = tuple(range(-len(shape), 0))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rstd, weight = ctx.saved_tensors
        g = g if weight is None else g * weight
        return (g - g.mean(ctx.axes, keepdim=True)) * rstd, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        rstd, weight = ctx.saved_tensors
        y = (t - t.mean(ctx.axes, keepdim=True)) * rstd
        return y if weight is None else y * weight


def held_layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """F.layer_norm with σ held constant; the mean is not."""
    trained = any(t is not None and t.requires_grad for t in (weight, bias))
    if not trained and x.dtype.itemsize >= 4:
        return _HeldNorm.apply(x, shape, weight, bias, eps)
    axes = tuple(range(-len(shape), 0))
    wide = x.float() if x.dtype.itemsize < 4 else x
    centered = wide - wide.mean(axes, keepdim=True)
    sigma = (centered.detach().pow(2).mean(axes, keepdim=True) + eps).sqrt()
    y = (centered / sigma).to(x.dtype)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def held_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """F.rms_norm with the root mean square held constant."""
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x / (x.detach().pow(2).mean(axes, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def held_slope(x: Tensor, fx: Tensor) -> Tensor:
    """An activation as s·x with s = f(x)/x held constant (1/2 at 0, the limit of GELU and SiLU)."""
    return _HeldSlope.apply(x, fx) if x.requires_grad else fx


class _HeldSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fx: Tensor) -> Tensor:
        slope = (fx / x).nan_to_num_(nan=0.5)
        ctx.save_for_backward(slope)
        ctx.save_for_forward(slope)
        return fx.clone()  # the model may change it in place, which a view does not allow

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return g * slope, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        (slope,) = ctx.saved_tensors
        return t * slope


def scaled_attention(
    sdpa: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    rules: Rules,
    key_weights: Tensor | None = None,
) -> Tensor:
    """A·v by the fused kernel, under the rules of attention and value; the backward pass recomputes A.

    Args:
        key_weights: Ones (b, keys) that require a gradient. Theirs is Σ_h Σ_{i≠j} ∂T/∂S_hij, the effect of
            key j on all other tokens: S + log w enters the softmax, but for a token's own key.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _ScaledAttention.apply(sdpa, q, k, v, key_weights, mask, scale, rules.attention, rules.value)


class _ScaledAttention(torch.autograd.Function):
    """Scaled attention without N x N tensors in the graph: memory does not grow with depth x N²."""

    @staticmethod
    def forward(
        ctx: Any,
        sdpa: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_weights: Tensor | None,
        mask: Tensor | None,
        scale: float,
        to_logits: float,
        to_value: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.to_logits, ctx.to_value = scale, to_logits, to_value
        return sdpa(q, k, v, attn_mask=mask, scale=scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        _, needs_q, needs_k, needs_v, needs_keys, *_ = ctx.needs_input_grad
        scaled = q * ctx.scale
        logits = scaled @ k.transpose(-2, -1)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        a = logits.softmax(-1)
        dq = dk = dv = keys = None
        if needs_v:
            dv = a.transpose(-2, -1) @ (g * ctx.to_value if ctx.to_value != 1.0 else g)
        through_logits = ctx.to_logits != 0.0 and (needs_q or needs_k)
        if through_logits or needs_keys:
            ds = a * (g @ v.transpose(-2, -1))  # A ⊙ G
            ds = ds - a * ds.sum(-1, keepdim=True)  # ∂T/∂S
            if needs_keys:
                keys = ds.sum((1, 2)) - ds.diagonal(dim1=-2, dim2=-1).sum(1)
            if through_logits:
                dq = (ds @ k) * (ctx.scale * ctx.to_logits)
                dk = ds.transpose(-2, -1) @ (scaled * ctx.to_logits)
        return None, dq, dk, dv, keys, None, None, None, None
