"""Bias terms of FullGrad for hierarchical models, whose blocks rearrange tokens (windows, merging).

A block is J·x + offset, J its Jacobian at x under the rules. As long as the block has not rearranged its
tokens, a bias or the offset of a nonlinear map is attributed to the token it is added to (`Placed`: norms,
MLP, mostly the projections; as in any other ViT). The rest of the offset is attributed to the output tokens
of the block.

| rest     | definition                                          | by one forward-mode derivative            |
| explicit | Σ_b ∂block/∂b · b over biases b that are not placed | x constant, along those biases            |
| complete | block(x) − J·x minus the effect of placed offsets   | along x and placed offsets; then out − it |

BAM_n = ⟨rest_n, ∂y/∂out_n⟩ (Srinivas & Fleuret 2019; docs/equations.md#fullgrad). Nothing here is larger
than what the block itself computes, twice.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from steadygaze.trace.record import Term, Want
from steadygaze.trace.rules import Rules
from steadygaze.trace.seam import Seam
from steadygaze.vit.intercept import TorchFunction
from steadygaze.vit.view import Block, Layout, remember

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def batch_norm_offset(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Float[Tensor, " c"]:
    """β − μγ/σ: what a batch norm adds (docs/equations.md#fullgrad)."""
    offset = -mean * (variance + eps).rsqrt() * (1 if weight is None else weight)
    return offset if bias is None else offset + bias


class Pooled(Seam):
    """A seam that also records what a batch norm behind the pooling adds to (B, C) (LeViT's head)."""

    def __init__(self, rules: Rules, want: Want) -> None:
        super().__init__(rules, want)
        self.intercept("batch_norm", F.batch_norm)

    def batch_norm(
        self,
        func: TorchFunction,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        y = func(x, mean, variance, weight, bias, training, momentum, eps)
        if not self.want.bias or y.dim() != 2:
            return y
        return self.term(y, batch_norm_offset(mean, variance, weight, bias, eps))


class Placed(Seam):
    """A seam that records only the terms of maps whose tokens are arranged like the block's input."""

    tokens: tuple[int, ...] = ()  # (B, N) of the block's input
    feature_map: tuple[int, ...] = ()  # (B, h, w), where the block takes its tokens so

    def begin(self, block: Block, x: Tensor, layout: Layout) -> "Placed":
        """Make ready for `block` on x."""
        self.tokens = tuple(x.shape[:2])
        self.feature_map = tuple(block.patches(x.detach(), layout).shape[:3]) if block.channels_last else ()
        return self

    def placed(self, y: Tensor) -> bool:
        return tuple(y.shape[:-1]) in (self.tokens, self.feature_map)

    def term(
        self, y: Tensor, offset: Tensor, axes: int | tuple[int, ...] = -2, *, implicit: bool = False
    ) -> Tensor:
        return (
            super().term(y, offset, tuple(range(1, y.dim() - 1)), implicit=implicit) if self.placed(y) else y
        )


class Push(Placed):
    """Adds offsets to the tangent of the map that they belong to, in forward mode."""

    def __init__(self, rules: Rules, rest: Literal["explicit", "complete"]) -> None:
        # attention is written out: the fused kernel has no derivative in forward mode
        super().__init__(rules, Want(hidden=False, attention=True, bias=True, implicit=rest == "complete"))
        self.adds_placed = rest == "complete"
        self.intercept("convolution", *CONVOLUTIONS)
        self.intercept("batch_norm", F.batch_norm)

    def term(
        self, y: Tensor, offset: Tensor, axes: int | tuple[int, ...] = -2, *, implicit: bool = False
    ) -> Tensor:
        return self.moved(y, offset) if self.placed(y) is self.adds_placed else y

    def moved(self, y: Tensor, offset: Tensor) -> Tensor:
        """y with `offset` added to its tangent, unless it does not depend on the tokens."""
        if not y.requires_grad:
            return y
        value, tangent = forward_ad.unpack_dual(y)
        offset = forward_ad.unpack_dual(offset).primal.detach().expand_as(value)
        return forward_ad.make_dual(value, offset.clone() if tangent is None else tangent + offset)

    def convolution(
        self,
        func: TorchFunction,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        y = func(x, weight, bias, *args, **kwargs)
        return (
            y if bias is None or self.adds_placed else self.moved(y, bias.view(-1, *[1] * (weight.dim() - 2)))
        )

    def batch_norm(
        self,
        func: TorchFunction,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        y = func(x, mean, variance, weight, bias, training, momentum, eps)
        shift = batch_norm_offset(mean, variance, weight, bias, eps)
        return y if self.adds_placed else self.moved(y, shift.view(-1, *[1] * (x.dim() - 2)))


def rest_of(
    block: Block,
    x: Float[Tensor, "b n c"],
    layout: Layout,
    rules: Rules,
    rest: Literal["explicit", "complete"],
) -> Float[Tensor, "b m d"]:
    """What of the offset of `block` at its input x is not placed, shaped as its output."""
    x, complete = x.detach(), rest == "complete"
    with torch.enable_grad(), forward_ad.dual_level():
        moving = forward_ad.make_dual(
            x.clone().requires_grad_(), x.clone() if complete else torch.zeros_like(x)
        )
        with Push(rules, rest).begin(block, x, layout):
            out = block(remember(moving, layout))
        value, tangent = forward_ad.unpack_dual(out)
        tangent = torch.zeros_like(value) if tangent is None else tangent
        return (value - tangent if complete else tangent).detach().clone()


def rests(
    block: Block, x: Tensor, out: Tensor, layout: Layout, rules: Rules, *, implicit: bool
) -> list[Term]:
    """The rest of the offset as terms at `out`: of explicit biases, and (`implicit`) of everything else."""
    explicit = rest_of(block, x, layout, rules, "explicit")
    terms: list[Term] = [Term(out, explicit, (1,), False)]
    if implicit:
        terms.append(Term(out, rest_of(block, x, layout, rules, "complete") - explicit, (1,), True))
    return terms
