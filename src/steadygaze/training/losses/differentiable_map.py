"""Attribution maps a loss can be taken of: the graph is kept, so that training can change what a model
attends to.

One forward pass gives both the map and the logits. `second_order=False` is what the authors of the relevance
loss ran: the gradient G inside a map is a constant, and the loss reaches the weights only through A (or x).
`second_order=True` differentiates G too, and reaches every weight (docs/equations.md#second-order). What a
method's own rules hold constant (σ, slopes) is constant in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.aggregate import aggregate, layers
from steadygaze.errors import MethodUnavailable
from steadygaze.explainer import rules_of, unavailable
from steadygaze.method_registry import Method
from steadygaze.methods import parse
from steadygaze.target import resolve_target, target_value
from steadygaze.trace import PLAIN, Attention, Forward, Trace, Want, forward
from steadygaze.training.losses.outputs import class_logits
from steadygaze.vit import Layout, ViT, adapt


@dataclass(frozen=True, eq=False)
class DifferentiableTrace(Trace):
    """A trace whose attentions and hidden states are still in the graph of the weights."""

    def seen(self, attention: Attention) -> Float[Tensor, "b heads q k"]:
        return attention.a

    def tokens(self, layer: int) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
        x = self.run.hidden[layer]
        return x, self.grad(x)


def differentiable_map(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    target: Any = None,
    method: str | Method = "gae",
    *,
    second_order: bool = False,
) -> tuple[Float[Tensor, "b gh gw"], Any]:
    """(map, outputs) of one pass, both in the graph of the model's weights.

    The outputs are the model's logits, or a pair if a distillation token is trained. A method whose rules
    change the backward pass (`gaze`, `decompx`) runs a second pass for them.
    """
    vit, m = adapt(model), parse(method) if isinstance(method, str) else method
    no_graph = m.base.kind == "model" or not m.base.differentiable
    reason = unavailable(m, vit) or ("it runs the model by itself, and leaves no graph" if no_graph else "")
    if reason:
        raise _not_trainable(m.name, reason)
    rules = rules_of(m) if m.base.gradient else PLAIN
    # attention also for double backward, which the fused kernel does not have
    needs = {**m.base.needs(dict(m.options)), "attention": True}
    want = Want(hidden=m.base.kind == "map", **needs)
    first = min(layers(m, len(vit.blocks)))
    outputs: list[Any] = []

    def head(x: Tensor, layout: Layout) -> Tensor:
        outputs.append(vit.plan.head(x, layout))
        return class_logits(outputs[0])

    view = ViT(vit.model, replace(vit.plan, head=head))
    watch = 0 if second_order else first
    run = forward(view, vit.embed(images), rules=rules, want=want, watch=watch, cut=False)
    trace = DifferentiableTrace(run)
    if m.base.gradient:
        classes: Any = target if callable(target) else resolve_target(target, run.logits)
        value = target_value(classes, m.score, run.logits)
        trace = _with_gradients(run, value, None if callable(target) else classes, first, second_order)
    scores = aggregate(trace, m)
    if torch.is_grad_enabled() and run.logits.requires_grad and not scores.requires_grad:
        if m.base.gradient and not second_order:
            raise _not_trainable(m.name, "its map is made of the gradient alone: use second_order=True")
        raise _not_trainable(m.name, "it leaves no graph")
    return scores, outputs[0] if rules == PLAIN else vit.logits(vit.embed(images))


def _not_trainable(method: str, reason: str) -> MethodUnavailable:
    return MethodUnavailable(
        f"{method} cannot be trained: {reason}. Use gae, rollout, raw_attention, ixg+plus or gaze."
    )


def _with_gradients(
    run: Forward, value: Tensor, classes: Any, first: int, second_order: bool
) -> DifferentiableTrace:
    """The trace with the gradients of `value` at all that a method may read, in the graph if
    `second_order`."""
    records = run.records[first:]
    tensors = [a.a for record in records for a in record.attention if a.a.requires_grad]
    tensors += [x for x in run.hidden[first:] if x.requires_grad] if run.want.hidden else []
    tensors += [y for record in records for y in record.norms if y.requires_grad]
    tensors += [y for record in records for y, *_ in (*record.terms, *record.rest) if y.requires_grad]
    distinct = list({id(t): t for t in tensors}.values())
    grads = torch.autograd.grad(
        value.sum(), distinct, retain_graph=True, create_graph=second_order, allow_unused=True
    )
    return DifferentiableTrace(run, {id(t): g for t, g in zip(distinct, grads, strict=True)}, classes)
