"""The γ rule of a linear map as a backward pass (docs/equations.md#gamma-rule).

With y = W x + b, the contributions W_ij x_j and b_i of output i are weighted by 1 + γ where they have the
sign of y_i, and by 1 otherwise; D_i is their sum. Relevance y_i g_i is shared in proportion. As
a⁺ = (|a| + a) / 2, one more product, with |W|, gives both halves:

    D = (1 + γ/2) y + (γ/2) sign(y) (|W| |x| + |b|),      r = g ⊙ y / D, 0 where y = 0
    dx = (1 + γ/2) Wᵀ r + (γ/2) sign(x) ⊙ |W|ᵀ (sign(y) ⊙ r)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> y


class _Gamma(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: float, apply: Map, y: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, y)
        ctx.gamma, ctx.function = gamma, apply
        return y.view_as(y)

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

    how, more: the bias, stride, padding and so on
    """
    if not gamma or not x.requires_grad:
        return func(x, weight, *how, **more)
    bias: Tensor | None = more.pop("bias", how[0] if how else None)

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return func(x, weight, bias, *how[1:], **more)

    with torch.no_grad():
        y = apply(x, weight, bias)
    return _Gamma.apply(x, weight, bias, gamma, apply, y)
