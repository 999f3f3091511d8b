"""Context broadcasting: the mean token is added to every token (docs/equations.md#cb).

Hyeon-Woo et al., "Scratching Visual Transformer's Back with Uniform Attention", ICCV 2023.

| variant | x_i becomes               | m is the mean over all tokens, prefix tokens included |
| plain   | (x_i + m) / 2             |                                                       |
| scaled  | x_i + Λ ⊙ m               | Λ: one learned scale per channel                      |
| gate    | x_i ⊙ (x_0 + 1)           | x_0 is the class token at this point                  |
| hybrid  | x_i ⊙ x_0 + (x_i + m) / 2 |                                                       |

position: "end" of the branch (after its last linear layer, before the residual: the paper's choice), "mid"
(before its last linear layer) or "front" (before its first). where: "mlp", "msa" (attention) or "both".

start="identity" is Λ = 0 in "scaled" and x + g (CB(x) − x) with a learned scalar g = 0 in the others. The
initial Λ of the authors is not published: with start="paper" it is `init`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.modules.base import Allocation, Cost, Inserted, Start, check_start, checked_allocation

Variant = Literal["plain", "scaled", "gate", "hybrid"]
Position = Literal["end", "mid", "front"]
Where = Literal["mlp", "msa", "both"]


@dataclass(frozen=True)
class CB:
    """Options of context broadcasting.

    Attributes:
        variant: "plain", "scaled", "gate" or "hybrid".
        position: "end", "mid" or "front" of the branch.
        where: The branch: "mlp", "msa" or "both".
        allocation: The blocks that get it: "all", "shallow", "deep", "middle_deep", or block indices.
        init: Initial value of Λ in "scaled"; 0 changes no output.
        start: "paper", or "identity" for a module that changes no output before it is trained.

    Examples:
        >>> CB("scaled", start="identity").variant
        'scaled'
    """

    variant: Variant = "plain"
    position: Position = "end"
    where: Where = "mlp"
    allocation: Allocation | list[int] | range = "all"
    init: float = 0.0
    start: Start = "paper"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("variant", self.variant, Variant),
            ("position", self.position, Position),
            ("where", self.where, Where),
        ):
            if value not in get_args(choices):
                raise UnknownNameError(name, str(value), get_args(choices))
        if not isinstance(self.init, (int, float)) or self.init != self.init:
            raise InputError(f"init: expected a number, got {self.init!r}")
        check_start(self.start)
        if self.start == "identity" and self.variant == "scaled" and self.init != 0:
            raise InputError(
                f"init: expected 0 with start='identity', got {self.init!r}. "
                "Leave init out, or use start='paper'."
            )
        object.__setattr__(self, "allocation", checked_allocation(self.allocation))

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of a block in which it is inserted."""
        return ("mlp", "msa") if self.where == "both" else (self.where,)

    @property
    def needs_class_token(self) -> bool:
        return self.variant in ("gate", "hybrid")


class _Halfway(torch.autograd.Function):
    """(x + m) / 2. A symmetric linear map is its own gradient; autograd would do twice the work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        ctx.axes = axes
        return torch.lerp(x, x.mean(axes, keepdim=True), 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return halfway(g, ctx.axes), None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None) -> Tensor:
        return halfway(t, ctx.axes)


def halfway(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """(x + m) / 2 with m the mean over `axes`."""
    return _Halfway.apply(x, axes)


class _PartWay(torch.autograd.Function):
    """x + g ((x + m) / 2 − x) = x + g/2 (m − x), which is symmetric and linear in x like `_Halfway`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, axes: tuple[int, ...]) -> Tensor:
        ctx.axes = axes
        ctx.save_for_backward(x, gate)
        ctx.save_for_forward(x, gate)
        return torch.lerp(x, x.mean(axes, keepdim=True), 0.5 * gate)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, gate = ctx.saved_tensors
        to_gate = None
        if ctx.needs_input_grad[1]:
            # Σ g (m − x) without a temporary tensor of its size: Σ g m = Σ x mean(g)
            mean, axes = g.mean(ctx.axes, keepdim=True), ctx.axes
            total = (mean * x.sum(axes, keepdim=True)).sum() - torch.dot(g.flatten(), x.flatten())
            to_gate = (0.5 * total).reshape(gate.shape)
        return _PartWay.apply(g, gate, ctx.axes), to_gate, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, t_gate: Tensor | None, _: None) -> Tensor:
        x, gate = ctx.saved_tensors
        y = torch.zeros_like(x) if t is None else _PartWay.apply(t, gate, ctx.axes)
        return y if t_gate is None else y + 0.5 * t_gate * (x.mean(ctx.axes, keepdim=True) - x)


class ContextBroadcast(Inserted):
    """CB on tokens (B, N, C) or (B, h, w, C); with `channels_first` on (B, C, h, w).

    Examples:
        >>> ContextBroadcast(4, CB())(torch.randn(2, 9, 4)).shape
        torch.Size([2, 9, 4])
    """

    def __init__(self, width: int, spec: CB, *, channels_first: bool = False) -> None:
        options = {"module": "CB", "variant": spec.variant, "position": spec.position}
        super().__init__(options, spec.start, gated=spec.variant != "scaled")
        self.width, self.variant, self.channels_first = width, spec.variant, channels_first
        if spec.variant == "scaled":
            self.scale = nn.Parameter(torch.full((width,), float(spec.init)))

    def forward(self, x: Tensor) -> Tensor:
        axes = (2, 3) if self.channels_first else tuple(range(1, x.dim() - 1))
        if self.variant == "plain":
            return self.broadcast(x, axes)
        if self.variant == "scaled":
            scale = self.scale[:, None, None] if self.channels_first else self.scale
            return x + scale * x.mean(axes, keepdim=True)
        factor = x[:, :1] if self.gate is None else self.gate.to(x.dtype) * x[:, :1]
        factor = (factor + 1 if self.variant == "gate" else factor).expand_as(x)
        # for the seam: this factor of the product is the gate
        factor.activation_ = True  # type: ignore[attr-defined]
        return x * factor if self.variant == "gate" else x * factor + self.broadcast(x, axes)

    def broadcast(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """(x + m) / 2; with a gate, g of the way to it."""
        return halfway(x, axes) if self.gate is None else _PartWay.apply(x, self.gate.to(x.dtype), axes)

    def cost(self, tokens: int) -> Cost:
        mean, each = tokens * self.width, {"plain": 2, "scaled": 1, "gate": 1, "hybrid": 4}[self.variant]
        each += 0 if self.gate is None else {"plain": 1, "gate": 0, "hybrid": 1}[self.variant]
        operations = each * mean + (0 if self.variant == "gate" else mean)
        return Cost(sum(p.numel() for p in self.parameters()), 0, operations)
