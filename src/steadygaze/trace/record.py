"""What a forward pass records: attentions, norms and bias terms of each block."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Want:
    """What a forward pass is to record, besides the hidden states."""

    hidden: bool = True  # gradients with respect to the hidden states
    attention: bool = False  # attention weights A of every block, as tensors of the graph
    keys: bool = False  # the effect of each key on all other tokens, without A in the graph where possible
    value: bool = False  # the values v and A·v too
    query: bool = False  # queries and keys too, and gradients with respect to A·v
    bias: bool = False  # outputs of biased maps, for FullGrad
    implicit: bool = False  # outputs of nonlinear maps with their offsets f(x) − J·x
    norm: bool = False  # outputs of norms

    @property
    def weights(self) -> bool:
        """Whether A has to be written out as a tensor."""
        return self.attention or self.value or self.query or self.implicit

    def __or__(self, other: Want) -> Want:
        """Everything that either of the two wants."""
        names = [f.name for f in fields(self)]
        return Want(**{name: getattr(self, name) or getattr(other, name) for name in names})


@dataclass
class Attention:
    """One attention: weights A (b, h, q, k) after softmax, values v (b, h, k, d), and the output A·v.

    Attributes:
        q: Queries as they are multiplied with the keys, if wanted.
        k: Keys as they are multiplied with the queries, if wanted.
    """

    a: Tensor
    v: Tensor | None = None
    out: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


class Term(NamedTuple):
    """An offset that is added in `output`; it contributes Σ offset · ∂y/∂output.

    Attributes:
        axes: The token axis of `output`, or several axes that together hold the tokens.
        implicit: Whether it is the offset of a nonlinear map rather than a bias.
    """

    output: Tensor
    offset: Tensor
    axes: int | tuple[int, ...]
    implicit: bool


@dataclass
class Record:
    """What one block, or the head, left behind."""

    attention: list[Attention] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # ones (b, keys) whose gradient is the effect of a key
    terms: list[Term] = field(default_factory=list)
    rest: list[Term] = field(default_factory=list)  # terms at the tokens of the block's output: see `offsets`
    norms: list[Tensor] = field(default_factory=list)
