"""The seam: the only place that intercepts torch's mathematics, during our own forward pass and nowhere else.

A `Seam` is a `TorchFunctionMode`. While it is active, attention, norms, activations and biased linear maps of the model
are answered by the rules (what the backward pass holds constant) and recorded for each block. The model is not touched.

Attention is kept as a tensor of the graph only where it is wanted; elsewhere the fused kernel runs, with the gradients of
q, k and v scaled by the rules, which is the same thing.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steadygaze.trace.rules import (
    PLAIN,
    Rules,
    held_attention,
    held_layer_norm,
    held_rms_norm,
    held_slope,
    scale_grad,
)
from steadygaze.vit.evaluation_mode import Interception

ADD = (
    torch.add,
    torch.Tensor.add,
    torch.Tensor.__add__,
    torch.Tensor.__radd__,
    torch.Tensor.add_,
    torch.Tensor.__iadd__,
)
MUL = (
    torch.mul,
    torch.Tensor.mul,
    torch.Tensor.__mul__,
    torch.Tensor.__rmul__,
    torch.Tensor.mul_,
    torch.Tensor.__imul__,
)
DIV = (torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.div_, torch.Tensor.__itruediv__)
MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
ACTIVATIONS = (
    F.gelu,
    F.silu,
    F.relu,
    torch.relu,
    torch.Tensor.relu,
    F.hardswish,
    F.mish,
    F.elu,
    F.selu,
    F.celu,
    F.leaky_relu,
)  # f(0) = 0
GATES = (
    torch.sigmoid,
    torch.Tensor.sigmoid,
    F.sigmoid,
    torch.tanh,
    torch.Tensor.tanh,
    F.tanh,
)  # of QuickGELU, of a GELU by tanh
SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)


@dataclass(frozen=True)
class Want:
    """What a trace is to keep beside the hidden states."""

    hidden: bool = True  # gradients at the hidden states
    attention: bool = False  # A of every block, as tensors of the graph
    value: bool = False  # v and A·v too
    bias: bool = False  # outputs of biased maps, for FullGrad
    implicit: bool = False  # outputs of nonlinear maps with their offsets f(x) − J·x
    norm: bool = False  # outputs of norms

    def __or__(self, other: "Want") -> "Want":
        return Want(*(a or b for a, b in zip(self.__dict__.values(), other.__dict__.values(), strict=True)))


@dataclass
class Attention:
    """One attention of a block: weights A (b, h, q, k) after softmax, value v (b, h, k, d), result A·v."""

    a: Tensor
    v: Tensor | None = None
    out: Tensor | None = None


@dataclass
class Record:
    """What one block (or the head) left behind. A term is (output, offset, token axis or axes, implicit?): Σ offset·∂y/∂output."""

    attention: list[Attention] = field(default_factory=list)
    terms: list[tuple[Tensor, Tensor, Any, bool]] = field(default_factory=list)
    rest: list[tuple[Tensor, Tensor, Any, bool]] = field(
        default_factory=list
    )  # at the tokens that the block gives: `offsets`
    norms: list[Tensor] = field(default_factory=list)


class Seam(Interception):
    """Intercepts attention, norms, activations and biases by `rules`, and records what is wanted into `record`."""

    lenient = (
        False  # nn.MultiheadAttention in a form that is not known here runs as it is, and is not recorded
    )

    def __init__(self, rules: Rules = PLAIN, want: Want | None = None) -> None:
        super().__init__()
        self.rules, self.want, self.record = rules, want or Want(), Record()
        self.met = False  # whether this block's attention was seen
        self.pending: Attention | None = None  # attention that has not met its value yet
        self.tagged: list[Tensor] = []  # tensors of this block that carry a tag: what they are
        self.table: dict[Any, str] = {
            F.scaled_dot_product_attention: "sdpa",
            F.multi_head_attention_forward: "mha",
        }
        self.table |= dict.fromkeys(SOFTMAX, "softmax") | dict.fromkeys(MATMUL, "matmul")
        self.table |= {F.dropout: "dropout", torch.Tensor.to: "to", F.layer_norm: "layer_norm"}
        self.table |= {torch.layer_norm: "layer_norm", F.rms_norm: "rms_norm", torch.rms_norm: "rms_norm"}
        if rules.slope or rules.gate != "free" or self.want.implicit:
            self.table |= (
                dict.fromkeys(ACTIVATIONS, "activation")
                | dict.fromkeys(GATES, "sigmoid")
                | dict.fromkeys(ADD, "add")
            )
        if rules.gate != "free" or self.want.implicit:
            self.table |= dict.fromkeys(MUL, "mul") | dict.fromkeys(DIV, "div")
        if self.want.bias:
            self.table[F.linear] = "linear"
            self.table |= dict.fromkeys(ADD, "add")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.table.get(
            func
        )  # a name, not a bound method: that would be a cycle, and keep what is recorded alive
        return (
            func(*args, **(kwargs or {}))
            if name is None
            else getattr(self, name)(func, *args, **(kwargs or {}))
        )

    def next_record(self) -> Record:
        """A new record for the block that runs next; returns it."""
        self.forget()
        self.record, self.met = Record(), False
        return self.record

    def tag(self, x: Tensor, **tags: Any) -> Tensor:
        """Let a tensor carry what it is, until its block has run."""
        x.__dict__.update(tags)
        self.tagged.append(x)
        return x

    def forget(self) -> None:
        """Take all tags off: they refer to one another, and would keep the whole graph alive."""
        for x in self.tagged:
            for name in ("attention_", "product_", "source_", "activation_", "tanh_"):
                x.__dict__.pop(name, None)
        self.tagged.clear()
        self.pending = None

    def __exit__(self, *exc: Any) -> None:
        self.forget()
        super().__exit__(*exc)

    # -- attention ----------------------------------------------------------------------------------------------

    def sdpa(self, func: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
             is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        want, rules, self.met = self.want, self.rules, True
        if not (want.attention or want.value or want.implicit):
            if (
                rules.attention == 0.0
                and rules.value == 1.0
                and v.requires_grad
                and not (dropout_p or is_causal or enable_gqa)
            ):
                return held_attention(func, q, k, v, attn_mask, scale)
            q, k = (scale_grad(t, rules.attention) for t in (q, k))
            return func(q, k, scale_grad(v, rules.value), attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                        scale=scale, enable_gqa=enable_gqa)  # fmt: skip
        if enable_gqa and q.shape[-3] != k.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        raw = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
        logits = raw
        if is_causal:
            attn_mask = torch.ones(raw.shape[-2:], dtype=torch.bool, device=raw.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            logits = raw.masked_fill(~attn_mask, float("-inf")) if masked else raw + attn_mask
        a = self.weights(torch.softmax(logits, dim=-1))
        a = F.dropout(a, dropout_p) if dropout_p else a
        out = a @ scale_grad(v, rules.value)
        self.record.attention.append(Attention(a, v, out))
        return (
            self.attention_offset(raw, q.requires_grad + k.requires_grad, a, v, out) if want.implicit else out
        )

    def weights(self, a: Tensor) -> Tensor:
        """A with its gradient scaled by the rules; where it is wholly frozen it is a leaf, so that ∂y/∂A still exists."""
        a = scale_grad(a, self.rules.attention)
        if not a.requires_grad and torch.is_grad_enabled() and self.want.attention:
            a = a.detach().requires_grad_()
        return a

    def softmax(self, func: Any, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Eager attention: a softmax over the keys of a (batch, heads, queries, keys) tensor."""
        y = func(x, dim, *args, **kwargs)
        if x.dim() < 4 or dim not in (-1, x.dim() - 1):
            return y
        y, self.met = self.weights(y), True
        self.pending = Attention(y)
        if self.want.attention or self.want.value or self.want.implicit:
            self.record.attention.append(self.pending)
        return self.tag(y, attention_=self.pending, product_=getattr(x, "product_", (x, 2)))

    def matmul(self, func: Any, a: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        attention = getattr(a, "attention_", None)
        if hasattr(a, "weights_"):  # TAP: rows that mix tokens, made from the tokens, are a gate
            half = 0.5 if self.rules.gate == "half" else 1.0
            return func(
                scale_grad(a, 0.0 if self.rules.gate == "held" else half), scale_grad(v, half), **kwargs
            )
        if attention is None:
            if (
                self.pending is not None and a.shape == self.pending.a.shape
            ):  # talking heads: A was mixed before it meets v
                v, self.pending = scale_grad(v, self.rules.value), None
            y = func(a, v, **kwargs)
            if self.want.implicit:
                self.tag(y, product_=(y, a.requires_grad + v.requires_grad))
            return y
        out = func(a, scale_grad(v, self.rules.value), **kwargs)
        attention.v, attention.out, self.pending = v, out, None
        if not self.want.implicit:
            return out
        raw, moving = a.product_  # type: ignore[attr-defined]
        return self.attention_offset(raw, moving, a, v, out)

    def dropout(
        self, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return func(x, p, training, inplace) if training and p > 0 else x

    def to(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = func(x, *args, **kwargs)
        if y is not x and hasattr(x, "attention_"):  # half precision: softmax in float32, then back
            x.attention_.a = y
            self.tag(y, attention_=x.attention_, product_=x.product_)  # type: ignore[attr-defined]
        return y

    def attention_offset(self, raw: Tensor, moving: int, a: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Offset of the attention core, A·v − J·(q, k, v): along (q, k) the logits move by their bilinear part `raw`, once
        for each of q and k that the tokens move (a learnt query does not)."""
        with torch.no_grad():
            ds = moving * raw
            da = a * (ds - (a * ds).sum(-1, keepdim=True))
            offset = (1 - self.rules.value) * out - self.rules.attention * (da @ v)
        return self.term(out, offset, implicit=True)

    def term(self, y: Tensor, offset: Tensor, axis: Any = -2, *, implicit: bool = False) -> Tensor:
        """Record an offset that is added in `y`, unless y does not depend on the tokens (a table of positions); gives y."""
        if y.requires_grad:
            self.record.terms.append((y, offset, axis, implicit))
        return y

    def mha(self, func: Any, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, w: Tensor, b: Tensor | None,
            bias_k: Any, bias_v: Any, add_zero: bool, dropout_p: float, w_out: Tensor, b_out: Tensor | None,
            training: bool = True, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """nn.MultiheadAttention on one sequence (sequence, batch, width), as torchvision calls it; `lenient`: in any form, such as
        attention pooling with a query of its own."""
        plain = query is key and key is value and bias_k is None and bias_v is None and not add_zero
        if not plain and getattr(self, "lenient", False):  # `self` may be another mode that borrows this
            rest = (width, heads, w, b, bias_k, bias_v, add_zero, dropout_p, w_out, b_out)
            return func(query, key, value, *rest, training=training, **kwargs)
        if not plain or kwargs.get("key_padding_mask") is not None or kwargs.get("use_separate_proj_weight"):
            raise NotImplementedError(
                "nn.MultiheadAttention in a form that no vision transformer of torchvision uses"
            )
        n, batch, _ = query.shape
        qkv = self.linear(F.linear, query.transpose(0, 1), w, b)
        q, k, v = qkv.reshape(batch, n, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        drop = dropout_p if training else 0.0
        out = self.sdpa(
            F.scaled_dot_product_attention, q, k, v, attn_mask=kwargs.get("attn_mask"), dropout_p=drop
        )
        out = self.linear(F.linear, out.transpose(1, 2).reshape(batch, n, width), w_out, b_out)
        return out.transpose(0, 1), None

    # -- norms, activations, gates, biases ----------------------------------------------------------------------

    def layer_norm(self, func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
                   eps: float = 1e-5, *args: Any) -> Tensor:  # fmt: skip
        held = self.rules.norm and x.requires_grad
        y = held_layer_norm(x, list(shape), weight, bias, eps) if held else func(x, shape, weight, bias, eps)
        if self.want.norm:
            self.record.norms.append(y)
        if self.want.bias and bias is not None:
            y = self.term(y, bias)
        if self.want.implicit and not self.rules.norm:
            with torch.no_grad():
                variance = x.var(-1, unbiased=False, keepdim=True) + eps
                offset = (y if bias is None else y - bias) * (1 - eps / variance)
            y = self.term(y, offset, implicit=True)
        return y

    def rms_norm(
        self, func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        y = held_rms_norm(x, list(shape), weight, eps) if self.rules.norm else func(x, shape, weight, eps)
        if self.want.norm:
            self.record.norms.append(y)
        if self.want.implicit and not self.rules.norm:
            with torch.no_grad():
                small = torch.finfo(x.dtype).eps if eps is None else eps
                offset = y * (1 - small / (x.pow(2).mean(-1, keepdim=True) + small))
            y = self.term(y, offset, implicit=True)
        return y

    def activation(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("inplace", None)
        if self.rules.slope:
            y = held_slope(x, func(x.detach(), *args, **kwargs))
        else:
            y = func(x, *args, **kwargs)
        if self.want.implicit and not self.rules.slope:
            y = self.tangent_offset(x, y, lambda t: func(t, *args, **kwargs))
        return self.tag(y, activation_=True)

    def sigmoid(self, func: Any, x: Tensor) -> Tensor:
        """A gate: of its own argument (QuickGELU), then the slope from the origin; or of another branch (gated attention).

        tanh is a gate in 1 + tanh (a GELU written out), which `add` sees; alone it is an activation.
        """
        if self.rules.slope and "tanh" in func.__name__:
            return self.tag(held_slope(x, func(x.detach())), tanh_=True)
        y = func(x)
        if self.rules.slope:
            return y.detach()
        if self.want.implicit:
            y = self.tangent_offset(x, y, func)
        return self.tag(y, activation_=True, source_=getattr(x, "source_", x))

    def tangent_offset(self, x: Tensor, y: Tensor, f: Any) -> Tensor:
        with torch.enable_grad():
            t = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(f(t).sum(), t)
        return self.term(y, (y - slope * x).detach(), implicit=True)

    def mul(self, func: Any, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """A product of two branches: act(gate)·x. By a parameter or a number it is linear, and needs no rule."""
        both = isinstance(x, Tensor) and isinstance(y, Tensor) and x.requires_grad and y.requires_grad
        if not both or x.is_leaf or y.is_leaf:
            out = func(x, y, **kwargs)
            if isinstance(x, Tensor) and not isinstance(y, Tensor):
                self.tag(out, source_=x)
            if self.want.implicit and hasattr(x, "product_"):
                self.tag(out, product_=(out, x.product_[1]))  # q·k times its scale
            return out
        own_gate = (
            getattr(y, "source_", None) is x or getattr(x, "source_", None) is y
        )  # QuickGELU with its own slope
        gate_x, gate_y = hasattr(x, "activation_"), hasattr(y, "activation_")
        if self.rules.gate == "held" and (gate_x or gate_y) and not own_gate:
            return func(x.detach(), y) if gate_x else func(x, y.detach())
        if self.rules.gate == "half" and x.shape == y.shape:
            return func(scale_grad(x, 0.5), scale_grad(y, 0.5))
        out = func(x, y, **kwargs)
        return self.term(out, -out.detach(), implicit=True) if self.want.implicit else out

    def div(self, func: Any, x: Any, y: Any, **kwargs: Any) -> Tensor:
        out = func(x, y, **kwargs)
        return self.tag(out, product_=(out, x.product_[1])) if hasattr(x, "product_") else out  # q·k over √d

    def linear(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = func(x, weight, bias)
        if self.want.bias and bias is not None:
            y = self.term(y, bias, 1 if y.dim() == 4 else -2)  # talking heads: (b, q, k, heads)
        return y

    def add(self, func: Any, x: Any, y: Any, **kwargs: Any) -> Tensor:
        if hasattr(x, "tanh_") and not isinstance(y, Tensor):
            return func(x.detach(), y, **kwargs)
        out = func(x, y, **kwargs)
        if self.want.bias and isinstance(x, Tensor) and isinstance(y, Tensor) and out.requires_grad:
            for bias, rest in ((x, y), (y, x)):
                if bias.dim() == 1 and rest.dim() >= 3 and bias.shape[0] == rest.shape[-1]:
                    out = self.term(out, bias)
        if hasattr(x, "product_"):
            self.tag(out, product_=x.product_)  # q·k and a table of relative positions
        return out
