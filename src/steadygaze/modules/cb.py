"""Context broadcasting: the mean token is added to every token (docs/equations.md#cb).

Hyeon-Woo et al., "Scratching Visual Transformer's Back with Uniform Attention", ICCV 2023.

| variant | x_i becomes               | m is the mean over all tokens, prefix tokens included |
| plain   | (x_i + m) / 2             |                                                       |
| scaled  | x_i + Λ ⊙ m               | Λ: one learned scale per channel                      |
| gate    | x_i ⊙ (x_0 + 1)           | x_0 is the class token at this point                  |
| hybrid  | x_i ⊙ x_0 + (x_i + m) / 2 |                                                       |

position: "end" of the branch (after its last linear layer, before the residual: the paper's choice), "mid"
(before its last linear layer) or "front" (before its first). where: "mlp", "msa" (attention) or "both".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.modules.base import Allocation, Cost, Inserted, checked_allocation

Variant = Literal["plain", "scaled", "gate", "hybrid"]
Position = Literal["end", "mid", "front"]
Where = Literal["mlp", "msa", "both"]


@dataclass(frozen=True)
class CB:
    """Options of context broadcasting. init: initial value of Λ in "scaled"; 0 changes no output."""

    variant: Variant = "plain"
    position: Position = "end"
    where: Where = "mlp"
    allocation: Allocation | list[int] | range = "all"
    init: float = 0.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("variant", self.variant, Variant),
            ("position", self.position, Position),
            ("where", self.where, Where),
        ):
            if value not in get_args(known):
                raise UnknownName(name, str(value), get_args(known))
        if not isinstance(self.init, (int, float)) or self.init != self.init:
            raise BadInput(f"init: expected a number, got {self.init!r}")
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


class ContextBroadcast(Inserted):
    """CB on tokens (B, N, C) or (B, h, w, C); with `channels_first` on (B, C, h, w)."""

    def __init__(self, width: int, spec: CB, *, channels_first: bool = False) -> None:
        super().__init__()
        self.width, self.variant, self.channels_first = width, spec.variant, channels_first
        self.spec = {"module": "CB", "variant": spec.variant, "position": spec.position}
        if spec.variant == "scaled":
            self.scale = nn.Parameter(torch.full((width,), float(spec.init)))

    def forward(self, x: Tensor) -> Tensor:
        axes = (2, 3) if self.channels_first else tuple(range(1, x.dim() - 1))
        if self.variant == "plain":
            return halfway(x, axes)
        if self.variant == "scaled":
            scale = self.scale[:, None, None] if self.channels_first else self.scale
            return x + scale * x.mean(axes, keepdim=True)
        gate = (x[:, :1] + 1 if self.variant == "gate" else x[:, :1]).expand_as(x)
        # for the seam: this factor of the product is the gate
        gate.activation_ = True  # type: ignore[attr-defined]
        return x * gate if self.variant == "gate" else x * gate + halfway(x, axes)

    def cost(self, tokens: int) -> Cost:
        mean, each = tokens * self.width, {"plain": 2, "scaled": 1, "gate": 1, "hybrid": 4}[self.variant]
        operations = each * mean + (0 if self.variant == "gate" else mean)
        return Cost(sum(p.numel() for p in self.parameters()), 0, operations)
