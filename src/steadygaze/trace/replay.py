"""Full decomposition: the model's own code, run on N source vectors at once (docs/equations.md#bias-sharing).

A first pass over x^l records what DecompX holds constant: A, σ and slopes. The second pass sends D (sources,
tokens, channels) with D_nk = δ_nk x_n through the same modules; every nonlinear map is replaced by its linear
one. Each bias is distributed over the sources:

| rule   | weight of source k                       |
| none   | none: biases go to a source of their own |
| absdot | |D_k · b|                                |
| norm   | ‖D_k‖                                    |
| equal  | 1 for each source that is not zero       |
| cls    | all to the first token                   |

Biases of norms and of the MLP are distributed where they are added. Those of attention, W_o b_v + b_o, are
distributed once, after the residual connection, as in DecompX: a row of D of its own carries them until then.

These rules are not linear in D, so no single backward pass can replace them. Cost and memory: N x N x d,
one image at a time.
"""

from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.trace.capture import Trace
from steadygaze.vit.intercept import (
    ACTIVATIONS,
    ADD,
    GATES,
    MUL,
    SOFTMAX,
    VECTOR_NORM,
    Interception,
    TorchFunction,
)
from steadygaze.vit.view import remember

BIAS_RULES = ("none", "token", "absdot", "norm", "equal", "cls")


class _Replay(Interception):
    """Records constants in the first pass, and uses them in the second."""

    def __init__(self, rule: str, tangent: bool) -> None:
        super().__init__()
        self.rule, self.tangent, self.noting = rule, tangent, True
        self.notes: list[Tensor] = []
        self.events: list[str] = []  # of the first pass: "linear", "attention", "residual"
        self.position = 0  # in `events`, of the second pass
        self.intercept("layer_norm", F.layer_norm)
        self.intercept("rms_norm", F.rms_norm)
        self.intercept("normalize", F.normalize)
        self.intercept("vector_norm", *VECTOR_NORM)
        self.intercept("linear", F.linear)
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("mha", F.multi_head_attention_forward)
        self.intercept("softmax", *SOFTMAX)
        self.intercept("activation", *ACTIVATIONS)
        self.intercept("gate", *GATES)
        self.intercept("mul", *MUL)
        self.intercept("add", *ADD)

    def note(self, value: Tensor) -> Tensor:
        """Keep a constant of the first pass; give it back, in the same order, in the second."""
        if self.noting:
            self.notes.append(value)
            return value
        return self.notes.pop(0)

    def event(self, kind: str) -> None:
        """Record linear maps, attention and residual connections; in the second pass, follow their order."""
        if self.noting:
            self.events.append(kind)
        else:
            self.position += 1

    @property
    def in_attention(self) -> bool:
        """Whether the current linear map of the second pass is in an attention branch.

        A branch lies between two residual connections.
        """
        before, after = self.events[: self.position][::-1], self.events[self.position :]
        branch = [*takewhile(_not_residual, before), *takewhile(_not_residual, after)]
        return "attention" in branch

    def add_bias(self, d: Float[Tensor, "s *n c"], b: Float[Tensor, "*#n c"]) -> Tensor:
        """D with the bias of a linear map: inside attention it waits for the residual connection."""
        self.event("linear")
        if not self.noting and self.in_attention:
            return torch.cat([d[:-1], d[-1:] + b])
        return self.share(d, b)

    def share(self, d: Float[Tensor, "s *n c"], b: Float[Tensor, "*#n c"]) -> Tensor:
        """D with the bias b: added to the state in the first pass, distributed over sources in the second."""
        if self.noting:
            return d + b
        sources, own, waiting = d[:-2], d[-2:-1], d[-1:]
        if self.rule in ("none", "token"):
            return torch.cat([sources, own + b, waiting])
        if self.rule == "absdot":
            weight = (sources * b).sum(-1).abs()
        elif self.rule == "norm":
            weight = sources.norm(dim=-1)
        elif self.rule == "equal":
            weight = (sources != 0).any(-1).to(d.dtype)
        else:
            weight = torch.zeros_like(sources[..., 0])
            weight[0] = 1
        weight = weight / (weight.sum(0, keepdim=True) + 1e-12)
        return torch.cat([sources + weight[..., None] * b, own, waiting])

    def linear(self, func: TorchFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = func(x, weight)
        y = y if bias is None else self.add_bias(y, bias)
        y.linear_ = True  # type: ignore[attr-defined]
        return y

    def layer_norm(
        self,
        func: TorchFunction,
        x: Tensor,
        shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
    ) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        y = centered * self.note((centered.pow(2).mean(-1, keepdim=True) + eps).rsqrt())
        y = y if weight is None else y * weight
        return y if bias is None else self.share(y, bias)

    def rms_norm(
        self,
        func: TorchFunction,
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        y = x * self.note((x.pow(2).mean(-1, keepdim=True) + eps).rsqrt())
        return y if weight is None else y * weight

    def normalize(
        self, func: TorchFunction, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **kwargs: Any
    ) -> Tensor:
        """x / ‖x‖ with ‖x‖ held constant."""
        return x / self.vector_norm(torch.norm, x, p, dim, keepdim=True).clamp_min(eps)

    def vector_norm(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """‖x‖, by which x is divided."""
        return self.note(func(x, *args, **kwargs))

    def activation(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("inplace", None)
        value = self.note(func(x, *args, **kwargs))
        if self.tangent:
            if self.noting:
                with torch.enable_grad():
                    t = x.detach().requires_grad_()
                    (slope,) = torch.autograd.grad(func(t, *args, **kwargs).sum(), t)
            slope = self.note(slope if self.noting else value)
            offset = self.note(value - slope * x if self.noting else value)
            y = self.share(x * slope, offset[0])
        else:
            slope = self.note((value / x).nan_to_num(nan=0.5) if self.noting else value)
            y = x * slope
        y.gate_ = value  # type: ignore[attr-defined]
        return y

    def gate(self, func: TorchFunction, x: Tensor) -> Tensor:
        y = self.note(func(x)).expand_as(x)
        y.gate_, y.source_, y.argument_ = y, getattr(x, "source_", x), x  # type: ignore[attr-defined]
        return y

    def mul(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """Hold the gate of a product of two branches constant; x·sigmoid(c x), QuickGELU, is not a gate."""
        if isinstance(x, Tensor) and not isinstance(y, Tensor):
            out = func(x, y, **kwargs)
            out.source_ = x
            return out
        own_gate = bool(getattr(y, "source_", self) is x)
        if self.tangent and own_gate:
            slope = self.note(y + y.argument_ * y * (1 - y))
            return self.share(x * slope, self.note(x * y - slope * x)[0])
        x = getattr(x, "gate_", x) if isinstance(y, Tensor) and y.dim() > 2 else x
        y = getattr(y, "gate_", y) if isinstance(x, Tensor) and x.dim() > 2 and not hasattr(x, "gate_") else y
        return func(x, y, **kwargs)

    def add(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        if isinstance(y, Tensor) and y.dim() == 1 and isinstance(x, Tensor) and x.dim() >= 3:
            return self.add_bias(x, y)
        out: Tensor = func(x, y, **kwargs)
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() == 3 and x.shape == y.shape):
            return out
        if _is_linear(x) and _is_linear(y):  # two linear maps of one input, such as LoRA beside a weight
            out.linear_ = True  # type: ignore[attr-defined]
        else:
            self.event("residual")
            if not self.noting:
                out = self.share(torch.cat([out[:-1], torch.zeros_like(out[-1:])]), out[-1])
        return out

    def softmax(
        self, func: TorchFunction, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        y: Tensor = func(x, dim, *args, **kwargs)
        if x.dim() != 4 or dim not in (-1, 3):
            return y
        self.event("attention")
        return self.note(y)

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if enable_gqa and q.shape[-3] != k.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        self.event("attention")
        if not self.noting:
            return self.note(v) @ v
        logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            logits = logits.masked_fill(~attn_mask, float("-inf")) if masked else logits + attn_mask
        return self.note(logits.softmax(-1)) @ v


@torch.no_grad()
def decompose(trace: Trace, layer: int, rule: str) -> Float[Tensor, "b n"]:
    """Score of every token of x^layer: Σ_c ∂T/∂y_c · (its share of logit c), biases shared out by `rule`."""
    vit, weights = trace.vit, trace.grad(trace.logits)
    if vit.plan.mixed or not vit.plan.global_attention:
        why = "convolutions, TAP, CB or registers mix them" if vit.plan.mixed else "its grids change"
        raise MethodUnavailableError(
            f"biases cannot be distributed over the tokens of a {vit.plan.kind}: {why}"
        )
    if rule == "cls" and vit.prefix == 0:
        raise MethodUnavailableError(
            f"bias='cls' attributes every bias to the class token, and this {vit.plan.kind} has none"
        )
    tangent = not trace.run.rules.slope
    scores = []
    for x, weight in zip(trace.run.hidden[layer].detach(), weights, strict=True):
        n, d = x.shape
        replay = _Replay(rule, tangent)
        sources = x.new_zeros(n + 2, n, d)  # one for each token, biases, biases of attention
        sources[torch.arange(n), torch.arange(n)] = x
        with replay:
            logits = _run(trace, layer, remember(x[None].clone(), trace.run.layout))
            replay.noting = False
            shares = _run(trace, layer, remember(sources, trace.run.layout))
        if not torch.allclose(shares.sum(0), logits[0], rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
            raise MethodUnavailableError(
                f"bias={rule!r}: the shares of the tokens do not sum to the logits of this {vit.plan.kind}, "
                "which adds something else (such as a class token behind the blocks). Use bias='none'."
            )
        scores.append(shares[:n] @ weight)
    return torch.stack(scores)


def _is_linear(x: Tensor) -> bool:
    """Whether x is the output of a linear map, perhaps scaled by a number."""
    return hasattr(x, "linear_") or hasattr(getattr(x, "source_", None), "linear_")


def _not_residual(event: str) -> bool:
    return event != "residual"


def _run(trace: Trace, layer: int, x: Tensor) -> Tensor:
    return trace.vit.logits(x, start=layer)
