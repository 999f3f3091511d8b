"""The base class of every torch function mode of this package, and the groups of functions they answer.

A mode sees the torch functions that a model calls while it is active, and may answer them itself:

    class Doubled(Interception):
        def __init__(self):
            super().__init__()
            self.intercept("softmax", *SOFTMAX)           # these functions go to the method `softmax`

        def softmax(self, func, x, *args, **kwargs):      # func: the function that the model called
            return 2 * func(x, *args, **kwargs)

    with Doubled():
        model(images)

Subclasses: the recording `Seam` and its kin, relevance propagation, bias sharing, masking, packing, and
positions of removed patches. This module imports torch only, so that `steadygaze.vit` can use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TorchFunction = Callable[..., Any]
Mode = TypeVar("Mode", bound="Interception")

ADD: tuple[TorchFunction, ...] = (
    torch.add,
    torch.Tensor.add,
    torch.Tensor.__add__,
    torch.Tensor.__radd__,
    torch.Tensor.add_,
    torch.Tensor.__iadd__,
)
MUL: tuple[TorchFunction, ...] = (
    torch.mul,
    torch.Tensor.mul,
    torch.Tensor.__mul__,
    torch.Tensor.__rmul__,
    torch.Tensor.mul_,
    torch.Tensor.__imul__,
)
DIV: tuple[TorchFunction, ...] = (
    torch.div,
    torch.Tensor.div,
    torch.Tensor.__truediv__,
    torch.Tensor.div_,
    torch.Tensor.__itruediv__,
)
MATMUL: tuple[TorchFunction, ...] = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
SOFTMAX: tuple[TorchFunction, ...] = (F.softmax, torch.softmax, torch.Tensor.softmax)
MEAN: tuple[TorchFunction, ...] = (torch.mean, torch.Tensor.mean)
LAYER_NORM: tuple[TorchFunction, ...] = (F.layer_norm, torch.layer_norm)
RMS_NORM: tuple[TorchFunction, ...] = (F.rms_norm, torch.rms_norm)
VECTOR_NORM: tuple[TorchFunction, ...] = (
    torch.norm,
    torch.Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
)
ACTIVATIONS: tuple[TorchFunction, ...] = (  # f(0) = 0
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
)
GATES: tuple[TorchFunction, ...] = (  # of QuickGELU, gated attention, and GELU written with tanh
    torch.sigmoid,
    torch.Tensor.sigmoid,
    F.sigmoid,
    torch.tanh,
    torch.Tensor.tanh,
    F.tanh,
)


class SharedState:
    """A context that the first of several nested or concurrent users enters, and the last one leaves."""

    _lock = Lock()

    def __init__(self) -> None:
        self.users, self.stack = 0, ExitStack()

    def enter(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        with self._lock:
            if not self.users:
                self.stack.enter_context(make())
            self.users += 1

    def leave(self) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                self.stack.close()


_EAGER = SharedState()


@contextmanager
def eager() -> Iterator[None]:
    """Compiled modules run uncompiled in this context."""
    _EAGER.enter(lambda: torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        _EAGER.leave()


class Interception(TorchFunctionMode):
    """A mode that answers some torch functions by methods of its own.

    Compiled modules run uncompiled inside it, since a mode does not see what compiled code calls.
    """

    lenient = False  # nn.MultiheadAttention in an unknown form runs as it is, instead of raising an error

    def __init__(self) -> None:
        super().__init__()
        # names, not bound methods: those would form a reference cycle and keep recorded tensors alive
        self.handlers: dict[TorchFunction, str] = {}

    def intercept(self, method: str, *functions: TorchFunction) -> None:
        """Answer `functions` by the method of this name, called as method(func, *args, **kwargs)."""
        self.handlers |= dict.fromkeys(functions, method)

    def __torch_function__(self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.handlers.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        return getattr(self, name)(func, *args, **(kwargs or {}))

    def __enter__(self: Mode) -> Mode:
        if not torch.compiler.is_compiling():
            _EAGER.enter(lambda: torch.compiler.set_stance("force_eager"))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling():
            _EAGER.leave()

    def linear(self, func: TorchFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear."""
        return func(x, weight, bias)

    def sdpa(self, func: TorchFunction, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """F.scaled_dot_product_attention."""
        return func(q, k, v, *args, **kwargs)

    def mha(
        self,
        func: TorchFunction,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        w: Tensor,
        b: Tensor | None,
        bias_k: Any,
        bias_v: Any,
        add_zero: bool,
        dropout_p: float,
        w_out: Tensor,
        b_out: Tensor | None,
        training: bool = True,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """F.multi_head_attention_forward, written with `linear` and `sdpa` of this mode.

        Sequences are (tokens, batch, width): self-attention as torchvision and open_clip call it, and
        attention pooling with a query of its own (SigLIP, CoCa).
        """
        plain = query is key and key is value and bias_k is None and bias_v is None and not add_zero
        if not plain and self.lenient:  # such as attention pooling with a query of its own
            weights = (width, heads, w, b, bias_k, bias_v, add_zero, dropout_p, w_out, b_out)
            return func(query, key, value, *weights, training=training, **kwargs)
        added = bias_k is not None or bias_v is not None or add_zero
        if key is not value or added or kwargs.get("key_padding_mask") is not None:
            raise NotImplementedError(
                "nn.MultiheadAttention in an unsupported form: separate values, added keys, or a padding mask"
            )
        q, k, v = self._projected(query, key, width, w, b, kwargs)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        dropout = dropout_p if training else 0.0
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dim() == 3:  # one for each image and head
            mask = mask.unflatten(0, (-1, heads))
        out = self.sdpa(F.scaled_dot_product_attention, q, k, v, attn_mask=mask, dropout_p=dropout)
        out = self.linear(F.linear, out.transpose(1, 2).flatten(-2), w_out, b_out)
        return out.transpose(0, 1), None

    def _projected(
        self,
        query: Tensor,
        key: Tensor,
        width: int,
        w: Tensor | None,
        b: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (batch, tokens, width), by one weight for all three or by one for each."""
        if query is key and w is not None:
            q, k, v = self.linear(F.linear, query.transpose(0, 1), w, b).chunk(3, dim=-1)
            return q, k, v
        if w is None:
            weights = [kwargs[f"{name}_proj_weight"] for name in "qkv"]
        else:
            weights = list(w.split(width))
        biases = [None] * 3 if b is None else b.split(width)
        q, k, v = (
            self.linear(F.linear, x.transpose(0, 1), weight, bias)
            for x, weight, bias in zip((query, key, key), weights, biases, strict=True)
        )
        return q, k, v
