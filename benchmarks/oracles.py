"""Two slow, independent references for a view. Neither uses the view's seam, rules or traces.

Removal: the whole model runs on all patches, and every attention gets −inf for the keys of the removed ones.

Decomposition (docs/equations.md#decompx): one run records what DecompX holds constant: attention, σ of every
norm, slope of every activation, gates, the argmax of every maximum. With these replayed the network is
affine, so the share of a source token is F(only that token) − F(nothing): one vector is propagated through
the model's own modules for every source, and one, F(nothing), for all biases.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)
NORM = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
ACTIVATION = (F.gelu, F.silu, F.relu, torch.relu, torch.Tensor.relu, torch.Tensor.relu_, F.hardswish)
SQUASH = (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, F.hardsigmoid)
TANH = (torch.tanh, torch.Tensor.tanh, F.tanh)
ADD = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
MULTIPLY = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.mul_)
MAXIMUM = (torch.Tensor.amax, torch.amax, F.max_pool2d, torch.max_pool2d)


class WideSoftmax(TorchFunctionMode):
    """Softmax in the model's own dtype: transformers' eager attention computes it in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in SOFTMAX:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


class MaskKeys(TorchFunctionMode):
    """−inf on the attention logits of the patches `removed` (B, r); prefix tokens come before the patches.

    behind: number of tokens that the model has behind its patches (detection tokens)
    """

    def __init__(self, removed: Tensor, patches: int, behind: int = 0) -> None:
        super().__init__()
        self.removed, self.patches, self.behind, self.seen = removed, patches, behind, 0

    def columns(self, batch: int, keys: int, like: Tensor) -> Tensor:
        mask = torch.zeros(batch, 1, 1, keys, dtype=like.dtype)
        self.seen += 1
        first = keys - self.patches - self.behind
        return mask.scatter_(3, (self.removed + first)[:, None, None, :], float("-inf"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            mask = kwargs.pop("attn_mask", args[3] if len(args) > 3 else None)
            columns = self.columns(q.shape[0], k.shape[-2], q)
            return func(*args[:3], *args[4:], attn_mask=columns if mask is None else mask + columns, **kwargs)
        if func in SOFTMAX and args[0].dim() == 4 and args[0].shape[-1] >= self.patches:
            return func(
                args[0] + self.columns(args[0].shape[0], args[0].shape[-1], args[0]), *args[1:], **kwargs
            )
        if func is F.multi_head_attention_forward:
            keys, batch = args[1].shape[0], args[1].shape[1]
            kwargs["key_padding_mask"] = self.columns(batch, keys, args[0])[:, 0, 0].isinf()
            kwargs["need_weights"] = True
            return func(*args, **kwargs)
        return func(*args, **kwargs)


def masked_run(
    model: nn.Module, last_block: nn.Module, images: Tensor, removed: Tensor, patches: int, behind: int = 0
) -> tuple[Tensor, Tensor]:
    """(output of the model, output of its last block) with the keys of removed patches masked in all
    layers."""
    caught: list[Any] = []
    handles = [last_block.register_forward_hook(lambda m, i, o: caught.append(o))]
    for module in model.modules():
        # a bias after the softmax gives removed keys a weight: their values become zero, too
        if type(module).__name__ == "TalkingHeadAttn":
            handles.append(
                module.qkv.register_forward_hook(lambda m, i, o: _without_values(o, removed, patches))
            )
    try:
        with torch.no_grad(), WideSoftmax(), MaskKeys(removed, patches, behind) as mode:
            output = model(images)
    finally:
        for handle in handles:
            handle.remove()
    assert mode.seen > 0, "the model has no attention that could be masked"
    last = caught[-1]
    logits = output if isinstance(output, Tensor) else output.logits
    return logits, last if isinstance(last, Tensor) else last[0]


def _without_values(qkv: Tensor, removed: Tensor, patches: int) -> Tensor:
    width = qkv.shape[-1] // 3
    qkv = qkv.clone()
    rows = (removed + qkv.shape[1] - patches)[:, :, None].expand(-1, -1, width)
    qkv[:, :, 2 * width :].scatter_(1, rows, 0.0)
    return qkv


class Frozen(TorchFunctionMode):
    """Records (first run) or replays (later runs) what DecompX holds constant, in the order of the calls."""

    def __init__(self, record: list[Tensor] | None = None) -> None:
        super().__init__()
        self.replay = record is not None
        self.record: list[Tensor] = [] if record is None else record
        self.next = 0
        self.activated: dict[int, Tensor] = {}
        self.tanh: dict[int, Tensor] = {}

    def constant(self, make: Callable[[], Tensor], rows: int) -> Tensor:
        """The value of the first run at this call, repeated to `rows` rows."""
        if not self.replay:
            self.record.append(make())
            return self.record[-1]
        value = self.record[self.next]
        self.next += 1
        if value.shape[0] in (1, rows):
            return value
        return value.repeat(rows // value.shape[0], *[1] * (value.dim() - 1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func in SOFTMAX:
            return self.constant(lambda: func(*args, **kwargs), args[0].shape[0])
        if func is F.multi_head_attention_forward:
            return self.packed(*args, **kwargs)
        if func in NORM:
            return self.norm("layer" in func.__name__, *args, **kwargs)
        if func is F.normalize:
            x = args[0]
            return x / self.constant(lambda: x.square().sum(-1, keepdim=True).sqrt(), x.shape[0])
        if func in ACTIVATION:
            x = args[0]
            kwargs.pop("inplace", None)
            y = x * self.constant(lambda: _slope(x, func(x.clone(), *args[1:], **kwargs)), x.shape[0])
            self.activated[id(y)] = y
            return y
        if func in TANH:  # alone, an activation; in 1 + tanh(x), which is a GELU written out, a gate
            y = args[0] * self.constant(lambda: _slope(args[0], func(args[0])), args[0].shape[0])
            self.tanh[id(y)] = y
            return y
        if func in ADD and id(args[0]) in self.tanh and not isinstance(args[1], Tensor):
            return self.constant(lambda: func(*args, **kwargs), args[0].shape[0])
        if func in SQUASH:
            return self.constant(lambda: func(*args, **kwargs), args[0].shape[0])
        if func in MULTIPLY and all(isinstance(a, Tensor) and not isinstance(a, nn.Parameter) for a in args):
            for gate, other in (args, args[::-1]):
                declared = getattr(gate, "activation_", False)  # CB's gate, which is no activation
                if (declared or id(gate) in self.activated) and other.shape == gate.shape:
                    return other * self.constant(lambda g=gate: g, other.shape[0])
        if func in MAXIMUM:
            return self.maximum(func, *args, **kwargs)
        return func(*args, **kwargs)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert not is_causal and not enable_gqa

        def weights() -> Tensor:
            logits = torch.einsum("...qd,...kd->...qk", q, k) * (
                q.shape[-1] ** -0.5 if scale is None else scale
            )
            if attn_mask is not None:
                logits = (
                    logits.masked_fill(~attn_mask, -torch.inf)
                    if attn_mask.dtype == torch.bool
                    else logits + attn_mask
                )
            e = (logits - logits.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True)

        return torch.einsum("...qk,...kd->...qd", self.constant(weights, q.shape[0]), v)

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        w: Tensor,
        b: Tensor,
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        w_out, b_out = rest[4], rest[5]
        projected = (
            t.transpose(0, 1) @ wi.T + bi
            for t, wi, bi in zip((query, key, value), w.chunk(3), b.chunk(3), strict=True)
        )
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in projected)
        out = self.attention(q, k, v).transpose(1, 2).flatten(2)
        return (out @ w_out.T + b_out).transpose(0, 1), None

    def norm(
        self, center: bool, x: Tensor, shape: Any, weight: Tensor | None = None, *rest: Any, **kwargs: Any
    ) -> Tensor:
        bias = (kwargs.get("bias", rest[0] if rest else None)) if center else None
        eps = kwargs.get("eps", rest[-1] if (rest[1:] if center else rest) else None)
        eps = (
            (1e-5 if center else torch.finfo(x.dtype).eps) if eps is None or isinstance(eps, Tensor) else eps
        )
        centered = x - x.mean(-1, keepdim=True) if center else x
        y = centered / self.constant(
            lambda: (centered.square().mean(-1, keepdim=True) + eps).sqrt(), x.shape[0]
        )
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def maximum(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if func in (F.max_pool2d, torch.max_pool2d):
            index = self.constant(
                lambda: F.max_pool2d(x, *args, **kwargs | {"return_indices": True})[1], x.shape[0]
            )
            return (
                x.flatten(2)
                .gather(2, index.expand(*x.shape[:2], -1, -1).flatten(2))
                .view(*x.shape[:2], *index.shape[2:])
            )
        dim = kwargs.get("dim", args[0] if args else None)
        assert isinstance(dim, int) and not kwargs.get("keepdim", False)
        index = self.constant(lambda: x.argmax(dim, keepdim=True), x.shape[0])
        shape = [
            i if d == dim % x.dim() else s for d, (i, s) in enumerate(zip(index.shape, x.shape, strict=True))
        ]
        return x.gather(dim, index.expand(shape)).squeeze(dim)


def _slope(x: Tensor, fx: Tensor) -> Tensor:
    return torch.where(x == 0, torch.full_like(x, 0.5), fx / x)


def decomposition(run: Callable[[Tensor], Tensor], x: Tensor, sources: list[int]) -> Tensor:
    """Shares (len(sources) + 1, classes) of the logits run(x), x (1, N, d): one row per source, the last for
    biases.

    `run` maps tokens (B, N, d) to logits with the model's own modules.
    """
    with torch.no_grad():
        with Frozen() as first:
            logits = run(x)
        vectors = x.new_zeros(len(sources) + 2, *x.shape[1:])
        for row, token in enumerate(sources):
            vectors[row, token] = x[0, token]
        vectors[-1] = x[0]
        with Frozen(first.record) as again:
            out = run(vectors)
        assert again.next == len(first.record), "the replay made other calls than the recording"
        scale = logits.abs().max().clamp_min(1.0)
        assert (out[-1] - logits[0]).abs().max() <= 1e-6 * scale, (
            "the replayed network differs from the model at its own input"
        )
    nothing = out[-2]
    return torch.cat([out[:-2] - nothing, nothing[None]])


@contextmanager
def unfused(model: nn.Module) -> Iterator[bool]:
    """Eager attention inside, for timm modules that can switch; yields whether any could."""
    switched = [m for m in model.modules() if getattr(m, "fused_attn", False) is True]
    for m in switched:
        m.fused_attn = False  # type: ignore[assignment]
    try:
        yield bool(switched)
    finally:
        for m in switched:
            m.fused_attn = True  # type: ignore[assignment]
