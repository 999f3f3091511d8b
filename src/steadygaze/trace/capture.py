"""One forward and one backward pass give hidden states, attentions and their gradients at every layer.

    run = forward(vit, tokens, rules=..., want=..., start=...)    # the forward pass, under the seam
    trace = run.trace(quantity)                                   # one backward pass, one scalar per image

Methods are pure functions of a `Trace`. Layers are numbered 0..L−1; x^l is the input of block l. Blocks
below `start` run without a graph: SkipPLUS needs no gradient there.

Formulas: docs/equations.md#notation, docs/equations.md#fullgrad.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.trace.offsets import Placed, Pooled, rests
from steadygaze.trace.record import Attention, Record, Term, Want
from steadygaze.trace.rules import PLAIN, Rules
from steadygaze.trace.seam import Seam
from steadygaze.vit.view import Layout, ViT, remember


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward pass that was recorded: everything but the gradients."""

    vit: ViT
    rules: Rules
    want: Want
    layout: Layout
    start: int
    hidden: tuple[
        Tensor, ...
    ]  # x^0 .. x^{L-1}, and the output of the last block; in the model's own token layout
    records: tuple[Record, ...]  # one for each block, and one for the head
    logits: Float[Tensor, "b classes"]

    def trace(
        self,
        quantity: Float[Tensor, " b"] | None,
        target: Int[Tensor, " b"] | None = None,
        *,
        retain: bool = False,
    ) -> "Trace":
        """Gradients of `quantity`, one scalar per image, at all recorded tensors; None: no backward pass."""
        if quantity is None:
            return Trace(self)
        inputs = list(self.hidden[self.start :]) if self.want.hidden else []
        attention = [a.a for r in self.records for a in r.attention if a.a.requires_grad]
        outputs = [a.out for r in self.records for a in r.attention if self.want.query and a.out is not None]
        keys = [weights for r in self.records for weights in r.keys]
        norms = [y for r in self.records for y in r.norms if y.requires_grad]
        terms = [y for r in self.records for y, *_ in (*r.terms, *r.rest) if y.requires_grad]
        everything = list(
            {id(t): t for t in [self.logits, *inputs, *attention, *outputs, *keys, *norms, *terms]}.values()
        )
        grads = torch.autograd.grad(quantity.sum(), everything, retain_graph=retain, allow_unused=True)
        gradients: dict[int, Tensor | None] = {id(t): g for t, g in zip(everything, grads, strict=True)}
        return Trace(self, gradients, target, quantity.detach())


@dataclass(frozen=True, eq=False)
class Trace:
    """Hidden states, attentions and the gradients of one scalar with respect to them."""

    run: Forward
    _grads: dict[int, Tensor | None] = field(default_factory=dict, repr=False)
    target: Int[Tensor, " b"] | None = None  # the class; None for a quantity of the user's own
    quantity: Float[Tensor, " b"] | None = None  # T; None if no gradient was taken
    memory: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # what several layers of one method share

    @property
    def vit(self) -> ViT:
        return self.run.vit

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.run.records) - 1

    @property
    def logits(self) -> Float[Tensor, "b classes"]:
        return self.run.logits

    def grad(self, x: Tensor) -> Tensor:
        """∂quantity/∂x for a recorded tensor; zeros where the quantity does not depend on it."""
        g = self._grads.get(id(x))
        return torch.zeros_like(x) if g is None else g

    def tokens(self, layer: int) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
        """(x^l, ∂T/∂x^l) with prefix tokens, in the model's own layout."""
        x = self.run.hidden[layer]
        return x.detach(), self.grad(x)

    def patches(self, layer: int) -> tuple[Float[Tensor, "b h w d"], Float[Tensor, "b h w d"]]:
        """(x^l, ∂T/∂x^l) of the patches, on the layer's own grid."""
        block = self.vit.blocks[layer]
        x, g = self.tokens(layer)
        return block.patches(x, self.run.layout), block.patches(g, self.run.layout)

    def weights(self, layer: int) -> Float[Tensor, "b heads n n"]:
        """A^l; the heads of parallel attentions of one block stand side by side."""
        seen = [self.seen(a) for a in self.run.records[layer].attention]
        return seen[0] if len(seen) == 1 else torch.cat(seen, 1)

    def seen(self, attention: Attention) -> Float[Tensor, "b heads q k"]:
        """A of one attention, of a block or of the head."""
        return attention.a.detach()

    def attention(self, layer: int) -> tuple[Float[Tensor, "b heads n n"], Float[Tensor, "b heads n n"]]:
        """(A^l, ∂T/∂A^l)."""
        seen = [self.grad(a.a) for a in self.run.records[layer].attention]
        return self.weights(layer), seen[0] if len(seen) == 1 else torch.cat(seen, 1)

    def key_effects(self, layer: int) -> Float[Tensor, "b n"]:
        """Σ_h Σ_{i≠j} ∂T/∂S^l_hij of every token j, S the attention logits: the attention of others to it."""
        total = self.logits.new_zeros(())
        for weights in self.run.records[layer].keys:
            total = total + self.grad(weights)
        for attention in self.run.records[layer].attention:
            a, g = self.seen(attention), self.grad(attention.a)
            product = a * g
            mean = product.sum(-1)  # Σ_k A_ik G_ik
            own = (product.diagonal(dim1=-2, dim2=-1) - a.diagonal(dim1=-2, dim2=-1) * mean).sum(1)
            total = total + product.sum((1, 2)) - torch.einsum("bhi,bhij->bj", mean, a) - own
        return total

    def mixing(self, layer: int) -> Attention:
        """The one attention of block l with v and A·v."""
        (attention,) = self.run.records[layer].attention
        return attention

    def norms(self, layer: int) -> list[Tensor]:
        return self.run.records[layer].norms

    def bias_terms(self, layer: int, *, implicit: bool = False) -> Float[Tensor, "b n"]:
        """Σ offset·∂T/∂output per token over the biased maps of block l, or of the head (l = L).

        Args:
            implicit: Also over the nonlinear maps.
        """
        return self._terms(self.run.records[layer].terms, self.run.hidden[layer].shape[1], implicit)

    def bias_rest(self, layer: int, *, implicit: bool = False) -> Float[Tensor, "b m"]:
        """What `bias_terms` omits if block l rearranges tokens (see `offsets`), per token of its output."""
        return self._terms(
            self.run.records[layer].rest, self.run.hidden[min(layer + 1, self.depth)].shape[1], implicit
        )

    def bias_maps(self, layer: int, *, implicit: bool = False) -> list[Float[Tensor, "b h w"]]:
        """`bias_terms` and `bias_rest` of the patches, each on its grid."""
        pieces = [(layer, self.bias_terms(layer, implicit=implicit))]
        if self.run.records[layer].rest:
            pieces.append((layer + 1, self.bias_rest(layer, implicit=implicit)))
        return [self.vit.patches(at, terms[..., None], self.run.layout)[..., 0] for at, terms in pieces]

    def _terms(self, terms: list[Term], tokens: int, implicit: bool) -> Float[Tensor, "b n"]:
        total = self.logits.new_zeros(self.logits.shape[0], tokens)
        for y, offset, axis, is_implicit in terms:
            if is_implicit and not implicit:
                continue
            g = self.grad(y) * offset
            if isinstance(axis, tuple):
                total = total + g.sum(-1).flatten(1)
                continue
            if g.dim() == 4 and g.shape[axis] != tokens == g.shape[1] * g.shape[2]:  # patches on their grid
                total = total + g.sum(-1).flatten(1)
                continue
            if g.dim() == 2 or g.shape[axis] != tokens:  # behind the pooling: no token axis
                total = total + self.readout_row() * g.flatten(1).sum(1, keepdim=True)
                continue
            axis %= g.dim()
            total = total + g.sum(dim=tuple(d for d in range(1, g.dim()) if d != axis))
        return total

    @cached_property
    def pooling(self) -> tuple[Attention, ...]:
        """Attentions of the head: attention pooling, class-attention blocks."""
        return tuple(self.run.records[-1].attention)

    def readout_row(self) -> Float[Tensor, "rows n"]:
        """How much each token feeds the head, for heads that read fixed tokens; sums to 1.

        One row for all images, or one for each where they have different patches of a weighted mean.
        """
        x, plan, kept = self.run.hidden[-1], self.vit.plan, self.run.layout.kept
        if plan.readout_weights is not None:
            weights = plan.readout_weights.to(x)
            weights = weights[None] if kept is None else weights[kept]
            row = torch.cat([weights.new_zeros(len(weights), plan.prefix), weights], 1)
            return row / row.sum(1, keepdim=True).clamp_min(torch.finfo(row.dtype).tiny)
        row = x.new_zeros(1, x.shape[1])
        if plan.readout == "class":
            row[:, list(plan.readout_rows)] = (1.0 - plan.readout_patches) / len(plan.readout_rows)
            row[:, plan.prefix :] = plan.readout_patches / max(x.shape[1] - plan.prefix, 1)
        else:
            row[:, plan.prefix :] = 1.0
            row[:, list(plan.readout_rows)] = 1.0
        return row / row.sum()


def forward(
    vit: ViT,
    tokens: Float[Tensor, "b n d"],
    *,
    rules: Rules = PLAIN,
    want: Want | None = None,
    start: int = 0,
    watch: int = 0,
    grad: bool = True,
    cut: bool = True,
) -> Forward:
    """Run the blocks and the head on `tokens`, recording what is wanted.

    Args:
        start: The first block with gradients: they reach x^start and everything above it.
        watch: The first block whose attention and so on are recorded; below it the fused kernel may run.
        grad: Whether there are gradients at all.
        cut: Whether x^start is cut from the graph; False allows gradients with respect to what made the
            tokens.
    """
    want = want or Want()
    head, unseen = Pooled(rules, want), Seam(rules)
    # if blocks rearrange tokens, only some terms can be attributed to a token of the input
    moves = want.bias and (vit.plan.mixed or not vit.plan.global_attention)
    seam = Placed(rules, want) if moves else head
    below, unseen_below = Seam(PLAIN, want), Seam(PLAIN)  # without a graph there is nothing to hold constant
    hidden, records = [], []
    layout = vit.layout(tokens)
    x = tokens
    for l, block in enumerate(vit.blocks):
        if l == start and grad and cut:
            x = remember(x.detach().requires_grad_(), vit.layout(x) if vit.plan.reads_layers else layout)
        hidden.append(x)
        active = (seam if l >= watch else unseen) if l >= start else below if l >= watch else unseen_below
        with torch.set_grad_enabled(grad and l >= start), active:
            if isinstance(active, Placed):
                active.begin(block, x, layout)
            records.append(active.next_record())
            x = block(x)
        if l >= min(start, watch) and not active.met:
            _needs_no_attention(vit, l, rules, want)
        if isinstance(active, Placed) and grad:
            records[-1].rest += rests(block, hidden[-1], x, layout, rules, implicit=want.implicit)
    hidden.append(x)
    with torch.set_grad_enabled(grad), head:
        records.append(head.next_record())
        logits = vit.head(x)
    return Forward(vit, rules, want, layout, start, tuple(hidden), tuple(records), logits)


def _needs_no_attention(vit: ViT, layer: int, rules: Rules, want: Want) -> None:
    """Raise an error if the attention of a block was not seen, but is read or held constant."""
    read = want.attention or want.value or want.keys
    empty = next(vit.blocks[layer].module.parameters(), None) is None
    if not vit.plan.global_attention or not (read or rules.attention != 1 or want.implicit):
        return
    if read and empty:
        raise MethodUnavailableError(
            f"block {layer} of this {vit.plan.kind} has no attention. If it does nothing, remove it from "
            f"the model."
        )
    if not empty:
        raise MethodUnavailableError(
            f"the attention of block {layer} of this {vit.plan.kind} runs in a kernel that cannot be "
            "inspected. Let it use F.scaled_dot_product_attention; in transformers, "
            "model.set_attn_implementation('sdpa')."
        )
