"""Maps that a loss can be taken of: the graph is kept, so that training can change what a model looks at.

One forward pass gives both the map and the logits. `second_order=False` is what the authors of relevance finetuning ran: the
gradient G inside a map is a constant, and the loss reaches the weights only through A (or x). `second_order=True` differentiates
G too, and reaches every weight (docs/equations.md#second-order). What a method's own rules hold constant (σ, slopes) stays constant in both.
"""

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
from steadygaze.vit import Layout, ViT, adapt


@dataclass(frozen=True, eq=False)
class Live(Trace):
    """A trace whose attentions and hidden states are still in the graph of the weights."""

    def seen(self, attention: Attention) -> Float[Tensor, "b heads q k"]:
        return attention.a

    def tokens(self, layer: int) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
        x = self.run.hidden[layer]
        return x, self.grad(x)


def live_map(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    target: Any = None,
    method: str | Method = "gae",
    *,
    second_order: bool = False,
) -> tuple[Float[Tensor, "b gh gw"], Any]:
    """(map, logits) of one pass, both in the graph of the model's weights. The logits are a pair where a distillation token is trained.

    A method whose rules change the backward pass (`gaze`, `decompx`) takes a second pass for the logits, which are the model's own.
    """
    vit, m = adapt(model), parse(method) if isinstance(method, str) else method
    alone = m.base.kind == "model" or not m.base.differentiable
    if why := unavailable(m, vit) or ("it runs the model by itself, and leaves no graph" if alone else ""):
        raise untrainable(m.name, why)
    rules = rules_of(m) if m.base.gradient else PLAIN
    # attention is needed for double backward too, which the fused kernel does not have
    needs = {**m.base.needs(dict(m.options)), "attention": True}
    want = Want(hidden=m.base.kind == "map", **needs)
    first = min(layers(m, len(vit.blocks)))
    watch = 0 if second_order else first
    given: list[Any] = []

    def head(x: Tensor, layout: Layout) -> Tensor:
        given.append(vit.plan.head(x, layout))
        return joined(given[0])

    view = ViT(vit.model, replace(vit.plan, head=head))
    run = forward(view, vit.embed(images), rules=rules, want=want, watch=watch, cut=False)
    trace = Live(run)
    if m.base.gradient:
        classes: Any = target if callable(target) else resolve_target(target, run.logits)
        value = target_value(classes, m.score, run.logits)
        trace = _traced(run, value, None if callable(target) else classes, first, second_order)
    found = aggregate(trace, m)
    if torch.is_grad_enabled() and run.logits.requires_grad and not found.requires_grad:
        first_order = m.base.gradient and not second_order
        raise untrainable(
            m.name,
            "its map is made of the gradient alone: take second_order=True"
            if first_order
            else "it leaves no graph",
        )
    return found, given[0] if rules == PLAIN else _plain_logits(vit, images)


def untrainable(name: str, why: str) -> MethodUnavailable:
    return MethodUnavailable(
        f"{name} cannot be trained: {why}. Use gae, rollout, raw_attention, ixg+plus or gaze."
    )


def joined(logits: Any) -> Float[Tensor, "b classes"]:
    """The logits that count: of a class and a distillation token, their mean."""
    return logits if isinstance(logits, Tensor) else sum(logits) / len(logits)


def _plain_logits(vit: ViT, images: Tensor) -> Any:
    return vit.logits(vit.embed(images))


def _traced(run: Forward, value: Tensor, classes: Any, first: int, second_order: bool) -> Live:
    """The gradients of `value` at what the method reads, kept in the graph where they are to be differentiated again."""
    wanted = [a.a for record in run.records[first:] for a in record.attention if a.a.requires_grad]
    wanted += [x for x in run.hidden[first:] if x.requires_grad] if run.want.hidden else []
    wanted += [y for record in run.records[first:] for y in record.norms if y.requires_grad]
    wanted += [
        y for record in run.records[first:] for y, *_ in (*record.terms, *record.rest) if y.requires_grad
    ]
    distinct = list({id(t): t for t in wanted}.values())
    grads = torch.autograd.grad(
        value.sum(), distinct, retain_graph=True, create_graph=second_order, allow_unused=True
    )
    return Live(run, {id(t): g for t, g in zip(distinct, grads, strict=True)}, classes)
