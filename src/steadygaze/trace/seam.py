"""The seam: records what happens inside a model's blocks, and applies the rules of the backward pass.

A `Seam` is an `Interception` that is active during a forward pass of ours and nowhere else; the model is
not changed. Attention, norms, activations and biased linear maps are computed with the `Rules` (what the
backward pass holds constant) and recorded per block as `Want` says.

Attention is kept as a tensor of the graph only where it is wanted. Elsewhere the fused kernel runs, with the
gradients of q, k and v scaled by the rules, which has the same effect.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.trace.record import Attention, Record, Term, Want
from steadygaze.trace.rules import (
    PLAIN,
    Rules,
    gamma_map,
    held_layer_norm,
    held_rms_norm,
    held_slope,
    scale_grad,
    scaled_attention,
)
from steadygaze.vit.intercept import (
    ACTIVATIONS,
    ADD,
    DIV,
    GATES,
    LAYER_NORM,
    MATMUL,
    MUL,
    RMS_NORM,
    SOFTMAX,
    VECTOR_NORM,
    Interception,
    TorchFunction,
)

TAGS = ("attention_", "product_", "source_", "activation_", "tanh_of_", "norm_of_", "factors_")


class Seam(Interception):
    """Applies `rules` to attention, norms, activations and gates, and records what is wanted into `record`.

    Tensors carry tags from one intercepted function to the next, until their block has run:

    | tag         | a tensor that                                                                       |
    | attention_  | is softmax's output: its `Attention`                                                |
    | product_    | comes from q·kᵀ: (that product, how many of q and k depend on the tokens)           |
    | source_     | is a scaled copy of another, or a gate: what it was computed from                   |
    | activation_ | is the output of an activation or gate                                              |
    | tanh_of_    | is tanh(x), which is a gate if 1 is added next (`tanh_` is a method of tensors): x  |
    | factors_    | comes from q·kᵀ: (q, k)                                                             |
    | norm_of_    | is ‖x‖, which scales x to unit length if x is divided by it next: x                 |
    """

    def __init__(self, rules: Rules = PLAIN, want: Want | None = None) -> None:
        super().__init__()
        self.rules, self.want, self.record = rules, want or Want(), Record()
        self.met = False  # whether this block's attention was seen
        self.pending: Attention | None = None  # attention that was not multiplied with its values yet
        self.tagged: list[Tensor] = []
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("mha", F.multi_head_attention_forward)
        self.intercept("softmax", *SOFTMAX)
        self.intercept("matmul", *MATMUL)
        self.intercept("dropout", F.dropout)
        self.intercept("to", torch.Tensor.to)
        self.intercept("layer_norm", *LAYER_NORM)
        self.intercept("rms_norm", *RMS_NORM)
        self.intercept("rsqrt", torch.rsqrt, torch.Tensor.rsqrt)
        if rules.unit or self.want.implicit or self.want.query:
            self.intercept("normalize", F.normalize)
            self.intercept("vector_norm", *VECTOR_NORM)
            self.intercept("div", *DIV)
        if rules.slope or rules.gate != "free" or self.want.implicit:
            self.intercept("activation", *ACTIVATIONS)
            self.intercept("sigmoid", *GATES)
            self.intercept("add", *ADD)
        if rules.gate != "free" or self.want.implicit or self.want.query:
            self.intercept("mul", *MUL)
        if self.want.bias or rules.gamma or rules.conv_gamma:
            self.intercept("linear", F.linear)
            self.intercept("convolution", F.conv2d)
        if self.want.bias or self.want.query:
            self.intercept("add", *ADD)

    def next_record(self) -> Record:
        """Start the record of the block that runs next, and return it."""
        self.forget()
        self.record, self.met = Record(), False
        return self.record

    def tag(self, x: Tensor, **tags: Any) -> Tensor:
        """Attach tags to a tensor until its block has run."""
        x.__dict__.update(tags)
        self.tagged.append(x)
        return x

    def forget(self) -> None:
        """Remove all tags: they refer to one another, and would keep the whole graph alive."""
        for x in self.tagged:
            for name in TAGS:
                x.__dict__.pop(name, None)
        self.tagged.clear()
        self.pending = None

    def __exit__(self, *exc: Any) -> None:
        self.forget()
        super().__exit__(*exc)

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Fused attention; written out where the weights are wanted."""
        want, rules, self.met = self.want, self.rules, True
        simple = v.requires_grad and v.dim() == 4 and not (dropout_p or is_causal or enable_gqa)
        held = (
            rules.attention == 0.0 and rules.value == 1.0
        )  # then the kernel's own backward pass does too much
        if simple and not want.weights and (want.keys or held):
            return scaled_attention(func, q, k, v, attn_mask, scale, rules, self.key_weights(q, k))
        if not (want.weights or want.keys):
            q, k = (scale_grad(t, rules.attention) for t in (q, k))
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return func(q, k, scale_grad(v, rules.value), **options, enable_gqa=enable_gqa)
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
        self.record.attention.append(Attention(a, v, out, q, k))
        if not want.implicit:
            return out
        return self.attention_offset(raw, q.requires_grad + k.requires_grad, a, v, out)

    def key_weights(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Ones (b, keys) whose gradient is the effect of each key, if wanted and if every key is a query."""
        if not self.want.keys or q.shape[-2] != k.shape[-2]:
            return None
        weights = torch.ones(k.shape[0], k.shape[-2], dtype=k.dtype, device=k.device, requires_grad=True)
        self.record.keys.append(weights)
        return weights

    def weights(self, a: Tensor) -> Tensor:
        """A with its gradient scaled by the rules. Fully frozen, it becomes a leaf, so that ∂y/∂A exists."""
        a = scale_grad(a, self.rules.attention)
        if not a.requires_grad and torch.is_grad_enabled() and (self.want.attention or self.want.keys):
            a = a.detach().requires_grad_()
        return a

    def softmax(
        self, func: TorchFunction, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Eager attention: a softmax over the keys of a (batch, heads, queries, keys) tensor."""
        y = func(x, dim, *args, **kwargs)
        if x.dim() < 4 or dim not in (-1, x.dim() - 1):
            return y
        y, self.met = self.weights(y), True
        self.pending = Attention(y)
        if self.want.weights or self.want.keys:
            self.pending.q, self.pending.k = getattr(x, "factors_", (None, None))
            self.record.attention.append(self.pending)
        return self.tag(y, attention_=self.pending, product_=getattr(x, "product_", (x, 2)))

    def matmul(self, func: TorchFunction, a: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        """A·v of eager attention; q·kᵀ before it."""
        attention = getattr(a, "attention_", None)
        if hasattr(a, "weights_"):  # TAP: pooling weights that are computed from the tokens are a gate
            half = 0.5 if self.rules.gate == "half" else 1.0
            gate = scale_grad(a, 0.0 if self.rules.gate == "held" else half)
            return func(gate, scale_grad(v, half), **kwargs)
        if attention is None:
            if self.pending is not None and a.shape == self.pending.a.shape:
                # talking heads: A was mixed over heads before it is multiplied with v
                v, self.pending = scale_grad(v, self.rules.value), None
            y = func(a, v, **kwargs)
            if self.want.query:
                self.tag(y, factors_=(a, v.transpose(-2, -1)))
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
        self, func: TorchFunction, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Dropout that does nothing returns its input, with its tags."""
        return func(x, p, training, inplace) if training and p > 0 else x

    def to(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention weights keep their tags in another dtype (half precision: softmax runs in float32)."""
        y = func(x, *args, **kwargs)
        if y is not x and hasattr(x, "attention_"):
            x.attention_.a = y
            self.tag(y, attention_=x.attention_, product_=x.product_)  # type: ignore[attr-defined]
        return y

    def attention_offset(self, raw: Tensor, moving: int, a: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Offset of the attention core, A·v − J·(q, k, v).

        Along (q, k) the logits change by their bilinear part `raw`, once for each of q and k that depends
        on the tokens (`moving` of them; a learned query does not).
        """
        with torch.no_grad():
            ds = moving * raw
            da = a * (ds - (a * ds).sum(-1, keepdim=True))
            offset = (1 - self.rules.value) * out - self.rules.attention * (da @ v)
        return self.term(out, offset, implicit=True)

    def term(
        self, y: Tensor, offset: Tensor, axes: int | tuple[int, ...] = -2, *, implicit: bool = False
    ) -> Tensor:
        """Record an offset that is added in `y` and return y; not if y does not depend on the tokens."""
        if y.requires_grad:
            self.record.terms.append(Term(y, offset, axes, implicit))
        return y

    def layer_norm(
        self,
        func: TorchFunction,
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *args: Any,
    ) -> Tensor:
        """Layer norm, with σ held constant by the rules."""
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
        self,
        func: TorchFunction,
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """RMS norm, with the root mean square held constant by the rules."""
        y = held_rms_norm(x, list(shape), weight, eps) if self.rules.norm else func(x, shape, weight, eps)
        if self.want.norm:
            self.record.norms.append(y)
        if self.want.implicit and not self.rules.norm:
            with torch.no_grad():
                small = torch.finfo(x.dtype).eps if eps is None else eps
                offset = y * (1 - small / (x.pow(2).mean(-1, keepdim=True) + small))
            y = self.term(y, offset, implicit=True)
        return y

    def rsqrt(self, func: TorchFunction, x: Tensor) -> Tensor:
        """1/σ of an RMS norm that is written out, as in language models; held constant by the rules."""
        if self.want.implicit and not self.rules.norm and x.requires_grad:
            raise MethodUnavailableError(
                "implicit=True: the offset of a norm that is written out is not known. "
                "Use implicit=False, or freeze=1: then there are no such terms."
            )
        return func(x).detach() if self.rules.norm else func(x)

    def normalize(
        self, func: TorchFunction, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **kwargs: Any
    ) -> Tensor:
        """x / ‖x‖, unit length, with ‖x‖ held constant by the rules."""
        if self.rules.unit:
            return x / x.detach().norm(p, dim, keepdim=True).clamp_min(eps)
        y = func(x, p, dim, eps, **kwargs)
        return self.term(y, y.detach(), implicit=True) if self.want.implicit else y  # J·x = 0

    def vector_norm(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """‖x‖, perhaps to scale x to unit length: see `div`."""
        return self.tag(func(x, *args, **kwargs), norm_of_=x)

    def activation(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """An activation, with its slope f(x)/x held constant by the rules."""
        kwargs.pop("inplace", None)
        if self.rules.slope:
            y = held_slope(x, func(x.detach(), *args, **kwargs))
        else:
            y = func(x, *args, **kwargs)
        if self.want.implicit and not self.rules.slope:
            y = self.tangent_offset(x, y, lambda t: func(t, *args, **kwargs))
        return self.tag(y, activation_=True)

    def sigmoid(self, func: TorchFunction, x: Tensor) -> Tensor:
        """A gate: of its own argument (QuickGELU: the slope from the origin), or of another branch (SwiGLU).

        tanh is a gate in 1 + tanh(x), as in a GELU written out, which `add` handles; alone it is an
        activation.
        """
        if self.rules.slope and "tanh" in func.__name__:
            return self.tag(held_slope(x, func(x.detach())), tanh_of_=x)
        y = func(x)
        if self.rules.slope:
            return y.detach()
        if self.want.implicit:
            y = self.tangent_offset(x, y, func)
        return self.tag(y, activation_=True, source_=getattr(x, "source_", x))

    def tangent_offset(self, x: Tensor, y: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Record f(x) − f'(x)·x, the offset of an elementwise function."""
        with torch.enable_grad():
            t = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(f(t).sum(), t)
        return self.term(y, (y - slope * x).detach(), implicit=True)

    def mul(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """A product of two branches, act(gate)·x; with a parameter or number it is linear, without rule."""
        both = isinstance(x, Tensor) and isinstance(y, Tensor) and x.requires_grad and y.requires_grad
        if not both or x.is_leaf or y.is_leaf:
            out = func(x, y, **kwargs)
            if isinstance(x, Tensor) and not isinstance(y, Tensor):
                self.tag(out, source_=x)
            if self.want.implicit and hasattr(x, "product_"):
                self.tag(out, product_=(out, x.product_[1]))  # q·k times its scale
            return self.same_factors(x, out)
        own_gate = getattr(y, "source_", None) is x or getattr(x, "source_", None) is y  # QuickGELU
        gate_x, gate_y = hasattr(x, "activation_"), hasattr(y, "activation_")
        if self.rules.gate == "held" and (gate_x or gate_y) and not own_gate:
            return func(x.detach(), y) if gate_x else func(x, y.detach())
        if self.rules.gate == "half" and x.shape == y.shape:
            return func(scale_grad(x, 0.5), scale_grad(y, 0.5))
        out = func(x, y, **kwargs)
        return self.term(out, -out.detach(), implicit=True) if self.want.implicit else out

    def div(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """x / ‖x‖ with ‖x‖ held constant by the rules; q·k / √d keeps its tag."""
        unit_length = isinstance(y, Tensor) and getattr(y, "norm_of_", None) is x
        if unit_length and self.rules.unit:
            return func(x, y.detach(), **kwargs)
        out = func(x, y, **kwargs)
        if unit_length and self.want.implicit:
            return self.term(out, out.detach(), implicit=True)  # J·x = 0
        out = self.tag(out, product_=(out, x.product_[1])) if hasattr(x, "product_") else out
        return self.same_factors(x, out)

    def same_factors(self, x: Any, out: Tensor) -> Tensor:
        """`out` comes from the same q·kᵀ as x."""
        return self.tag(out, factors_=x.factors_) if hasattr(x, "factors_") else out

    def linear(self, func: TorchFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear map, whose bias is a term; with the γ rule if the rules have one."""
        y = gamma_map(self.rules.gamma, func, x, weight, bias)
        if self.want.bias and bias is not None:
            y = self.term(y, bias, 1 if y.dim() == 4 else -2)  # talking heads: (b, q, k, heads)
        return y

    def convolution(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Tensor:
        """A convolution with the γ rule."""
        return gamma_map(self.rules.conv_gamma, func, *args, **kwargs)

    def add(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """A bias vector is a term; 1 + tanh(x) is a gate; logits with a position table keep their tag."""
        if hasattr(x, "tanh_of_") and not isinstance(y, Tensor):
            return func(x.detach(), y, **kwargs)
        out = func(x, y, **kwargs)
        if self.want.bias and isinstance(x, Tensor) and isinstance(y, Tensor) and out.requires_grad:
            for bias, rest in ((x, y), (y, x)):
                if bias.dim() == 1 and rest.dim() >= 3 and bias.shape[0] == rest.shape[-1]:
                    out = self.term(out, bias)
        if hasattr(x, "product_"):
            self.tag(out, product_=x.product_)
        return self.same_factors(x, out)
