"""Relevance propagation: TransAtt and full LRP (Chefer, Gur & Wolf 2021).

They send relevance R, one-hot at the class, back through the network by these rules
(docs/equations.md#transatt); a ⊘ b is a / (b + 1e-9):

| operation              | rule                                                                           |
| linear (bias ignored)  | R_in = x⁺ ⊙ (S W⁺) + x⁻ ⊙ (S W⁻), S = R ⊘ (x⁺ W⁺ᵀ + x⁻ W⁻ᵀ)                    |
| matmul A·V, Q·Kᵀ, gate | each operand X ⊙ ∂Z/∂X (R ⊘ Z), then halved                                    |
| residual a + b         | a' = a (R ⊘ Z), b' = b (R ⊘ Z); then a' |Σa'| / (|Σa'| + |Σb'|) · ΣR ⊘ Σa',    |
|                        | and the same for b' (sums over each image)                                     |
| norm, softmax, scale   | R passes; also through activations and LayerScale                              |
| pooling                | x ⊙ ∂Z/∂x (R ⊘ Z)                                                              |
| position embedding     | as a residual, its own share is dropped (full LRP)                             |
| patch convolution, z^B | R_in = (x − l) ⊙ Sᵀ W⁺ + (x − h) ⊙ Sᵀ W⁻, S = R ⊘ (W⁺ (x − l) + W⁻ (x − h)),   |
|                        | l and h the least and the greatest value of the image (full LRP)               |

TransAtt's matrix of a layer is T^l = mean_h (∂y/∂A ⊙ R_A)⁺, rolled out as R ← R + T R; full LRP is the
relevance of the pixels. In code, autograd carries relevance in place of a gradient.

Formulas: docs/equations.md#full-lrp.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.methods.attention import add_identity, global_attention
from steadygaze.methods.registry import register_method
from steadygaze.target import target_value
from steadygaze.trace.capture import Trace
from steadygaze.trace.query import Query
from steadygaze.vit.intercept import ADD, DIV, MATMUL, MEAN, MUL, SOFTMAX, Interception, TorchFunction
from steadygaze.vit.view import remember


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a ⊘ b: a / (b + 1e-9), and 0 where b is 0."""
    shifted = b + 1e-9
    return torch.where(
        b != 0, a / torch.where(shifted == 0, torch.full_like(b, 1e-9), shifted), torch.zeros_like(a)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        (xp, xn), (wp, wn) = (x.clamp(min=0), x.clamp(max=0)), (w.clamp(min=0), w.clamp(max=0))
        s = divide(r, xp @ wp.T + xn @ wn.T)
        return xp * (s @ wp) + xn * (s @ wn), None, None


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        z = a @ b
        ctx.save_for_backward(a, b, z)
        return z

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, Tensor]:
        a, b, z = ctx.saved_tensors
        s = divide(r, z)
        return a * (s @ b.transpose(-2, -1)) / 2, b * (a.transpose(-2, -1) @ s) / 2


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a + b

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        s = divide(r, a + b)
        a, b = a * s, b * s
        axes = tuple(range(1, a.dim()))
        total, sum_a, sum_b = (t.sum(axes, keepdim=True) for t in (r, a, b))
        both = sum_a.abs() + sum_b.abs()
        return (
            a * divide(divide(sum_a.abs(), both) * total, sum_a),
            b * divide(divide(sum_b.abs(), both) * total, sum_b),
        )


class _Product(torch.autograd.Function):
    """An elementwise product: half for each operand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, Tensor]:
        return r / 2, r / 2


class _Pass(torch.autograd.Function):
    """The value y for the input x; relevance passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.clone()  # the model may change it in place

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, None]:
        return r, None


class _Pool(torch.autograd.Function):
    """The mean over a set of tokens, or one of them: x ⊙ weight (R ⊘ Z)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, None, None]:
        x, z, weight = ctx.saved_tensors
        return x * weight * divide(r, z).unsqueeze(1), None, None


class _PatchConvolution(torch.autograd.Function):
    """The convolution that makes the patches, by the z^B rule: pixels lie between `low` and `high`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return F.conv2d(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        above, below = x - x.amin((1, 2, 3), keepdim=True), x - x.amax((1, 2, 3), keepdim=True)
        rising, raise_back = _convolve(above, weight.clamp(min=0), ctx.how)
        falling, fall_back = _convolve(below, weight.clamp(max=0), ctx.how)
        s = divide(r, rising + falling)
        return above * raise_back(s)[0] + below * fall_back(s)[0], *[None] * (2 + len(ctx.how))


def _convolve(
    x: Tensor, weight: Tensor, how: tuple[Any, ...]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """The convolution without a bias, and its transpose."""
    result: Any = torch.func.vjp(lambda pixels: F.conv2d(pixels, weight, None, *how), x)
    return result[0], result[1]


class _Relevance(Interception):
    """The model's own forward pass, with a graph that carries relevance."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[Tensor] = []
        self.intercept("passes", F.gelu, F.silu, F.relu, torch.relu, F.layer_norm, F.rms_norm, F.normalize)
        self.intercept("passes", torch.sigmoid, torch.Tensor.sigmoid)
        self.intercept("linear", F.linear)
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("mha", F.multi_head_attention_forward)
        self.intercept("select", torch.Tensor.__getitem__)
        self.intercept("mean", *MEAN)
        self.intercept("matmul", *MATMUL)
        self.intercept("add", *ADD)
        self.intercept("mul", *MUL)
        self.intercept("div", *DIV)
        self.intercept("softmax", *SOFTMAX)

    def passes(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _Pass.apply(x, func(x.detach(), *args, **kwargs))

    def linear(self, func: TorchFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _Linear.apply(x, weight, bias)

    def matmul(self, func: TorchFunction, a: Tensor, b: Tensor) -> Tensor:
        if b.dim() == 2 and not b.requires_grad:  # a linear map written as a product
            return _Linear.apply(a, b.T, None)
        return _Matmul.apply(a, b) if a.requires_grad and b.requires_grad else func(a, b)

    def softmax(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        a = self.passes(func, x, *args, **kwargs)
        if x.dim() == 4:
            self.attention.append(a)
        return a

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
        **kwargs: Any,
    ) -> Tensor:
        raw = _Matmul.apply(q, k.transpose(-2, -1))
        with torch.no_grad():
            logits = raw * (q.shape[-1] ** -0.5 if scale is None else scale)
            a = (logits if attn_mask is None else logits + attn_mask).softmax(-1)
        self.attention.append(_Pass.apply(raw, a))
        return _Matmul.apply(self.attention[-1], v)

    def add(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        graph = [t for t in (x, y) if isinstance(t, Tensor) and t.requires_grad]
        if len(graph) == 2 and x.shape == y.shape:
            return _Add.apply(x, y)
        return self._constant(func, graph, x, y)

    def mul(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        graph = [t for t in (x, y) if isinstance(t, Tensor) and t.requires_grad]
        if len(graph) == 2 and x.shape == y.shape:  # SwiGLU, QuickGELU: X ⊙ ∂Z/∂X (R ⊘ Z), halved
            return _Product.apply(x, y)
        return self._constant(func, graph, x, y)

    def div(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        graph = [t for t in (x, y) if isinstance(t, Tensor) and t.requires_grad]
        return self._constant(func, graph, x, y) if graph and graph[-1] is not y else func(x, y, **kwargs)

    def _constant(self, func: TorchFunction, graph: list[Tensor], x: Any, y: Any) -> Tensor:
        """An operand that is not part of the graph (LayerScale, a bias, a scale): relevance passes."""
        if len(graph) != 1:
            return func(x, y)
        value = func(*(t.detach() if isinstance(t, Tensor) else t for t in (x, y)))
        return _Pass.apply(graph[0], value) if value.shape == graph[0].shape else func(x, y)

    def select(self, func: TorchFunction, x: Tensor, index: Any) -> Tensor:
        y = func(x, index)
        if not (x.requires_grad and x.dim() == 3 and y.dim() == 2):
            return y
        weight = torch.zeros_like(x[:1, :, :1])
        weight[0, index[1]] = 1
        return _Pool.apply(x, y.detach(), weight)

    def mean(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = func(x, *args, **kwargs)
        if not (x.requires_grad and x.dim() == 3 and y.dim() == 2):
            return y
        return _Pool.apply(x, y.detach(), torch.full_like(x[:1, :1, :1], 1 / x.shape[1]))


class _EmbeddingRelevance(_Relevance):
    """From images to tokens: the patch convolution, and the position embedding as an operand of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.intercept("convolution", F.conv2d)

    def convolution(
        self, func: TorchFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any
    ) -> Tensor:
        return _PatchConvolution.apply(x, weight, bias, *how)

    def add(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and (x.requires_grad or y.requires_grad)):
            return func(x, y, **kwargs)
        return _Add.apply(*torch.broadcast_tensors(x, y))


def _plain_blocks(vit: Any) -> str:
    why = global_attention(vit)
    if why:
        return why
    if vit.plan.rotary or vit.plan.mixed or any(b.parts is None for b in vit.blocks) or vit.readout == "pool":
        return (
            f"its relevance rules are for pre-norm blocks without rotary positions and a class or mean head; "
            f"a {vit.plan.kind} is different. Use attnlrp."
        )
    return ""


def _plain_patches(vit: Any) -> str:
    why = _plain_blocks(vit)
    if why:
        return why
    convolutions = sum(isinstance(module, nn.Conv2d) for module in vit.model.modules())
    if convolutions != 1:
        return (
            f"its last rule is for patches made by one convolution of the image; this {vit.plan.kind} has "
            f"{convolutions} convolutions. Use transatt."
        )
    return ""


def relevances(trace: Trace) -> list[Float[Tensor, "b h n n"]]:
    """R_A of every block from the first one with a gradient on; computed once for a trace."""
    if "transatt" not in trace.memory:
        run, mode = trace.run, _Relevance()
        x = remember(run.hidden[run.start].detach().requires_grad_(), run.layout)
        with torch.enable_grad(), mode:
            logits = trace.vit.logits(x, start=run.start)
        one_hot = (
            trace.grad(run.logits)
            if trace.target is None
            else F.one_hot(trace.target, logits.shape[1]).to(logits)
        )
        of_blocks = mode.attention[: len(trace.vit.blocks) - run.start]  # a head may attend too
        relevance = torch.autograd.grad(logits, of_blocks, one_hot)
        trace.memory["transatt"] = [r.to(logits.dtype) for r in relevance]
    return trace.memory["transatt"]


def _transatt(a: Tensor, g: Tensor) -> Tensor:
    return (a * g).clamp(min=0).mean(1)


@register_method(
    "transatt",
    "matrix",
    family="propagation",
    aggregator="rollout",
    needs={"attention": True},
    unsupported=_plain_blocks,
    rollout_step=add_identity,
    differentiable=False,
    cost=5.0,
)
def transatt(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """LRP relevance of attention x gradient, R + T R over all blocks (start=1: as in the authors' code)."""
    return _transatt(relevances(trace)[layer - trace.run.start], trace.attention(layer)[1])


def pixel_relevance(query: Query) -> Float[Tensor, "b c h w"]:
    """Relevance of each channel of each pixel; the score does not enter, only the class."""
    pixels = query.images.detach().requires_grad_()
    with torch.enable_grad():
        with _EmbeddingRelevance():
            tokens = query.vit.embed(pixels)
        with _Relevance():
            logits = query.vit.logits(tokens)
        outputs = logits.detach().requires_grad_()
        assert query.target is not None  # its map depends on the class
        value = target_value(query.target, "logit", outputs)
        (start,) = torch.autograd.grad(value.sum(), outputs)  # one-hot
    return torch.autograd.grad(logits, pixels, start)[0]


@register_method(
    "full_lrp",
    "model",
    family="propagation",
    gradient=False,
    class_specific=True,
    unsupported=_plain_patches,
    cost=5.0,
)
def full_lrp(query: Query) -> Float[Tensor, "b h w"]:
    """LRP relevance down to the pixels, summed over each patch; starts from 1 at the class, for any score."""
    return query.per_patch(pixel_relevance(query), "pixels")
