"""The attention diversification loss (ADL): queries of a layer should not all attend to the same tokens.

Guo et al. 2023.

Equations: docs/equations.md#adl.

    M = mean over heads of A      t = τ / N      M̂ = M where M ≥ t, else 0      m̂ = mean_i M̂_i
    loss = mean over layers, images and rows i of cos(m̂, M̂_i)              0..1, lower is more diverse

form: "paper" as above (equations 1 and 2); "code" thresholds by >, takes m̂ from the mean of the whole rows
where that exceeds t, and divides by the number of layers + 1e-6; "per_head" is "paper" for each head by
itself.

In training, a `DiversitySeam` replaces scaled_dot_product_attention by a function that returns A·v and the
similarity of the rows of A. It stores A for the backward pass while that is small against what a block stores
anyway (`_stores_maps`), which saves a tenth of the time of a step. Above, it keeps q, k and v like the fused
kernel, and recomputes A. If a model computes its attention eagerly (softmax), or with dropout, the maps are
in the graph anyway: they are recorded, and `seam_loss` reads them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.trace import PLAIN, Record, Seam, Want
from steadygaze.training.losses.registry import Loss, LossBatch, LossOptions, Positive, register_loss

EPS = 1e-8
Buffers = dict[Hashable, Tensor]


class DiversitySeam(Seam):
    """Collects the similarity of the rows of every layer's attention, during the model's forward pass.

    Attributes:
        similarities: One scalar for each fused attention. Attention with a single query (class attention,
            pooling) is not attention between tokens and is not counted.
        record: Attention maps of layers that compute them eagerly.
    """

    lenient = True  # attention pooling is not attention between tokens

    def __init__(self, tau: float = 2.0, form: str = "paper") -> None:
        super().__init__(PLAIN, Want(hidden=False, attention=True))
        self.tau, self.form = tau, form
        self.record = Record()
        self.similarities: list[Float[Tensor, ""]] = []
        self.buffers: Buffers = {}

    def sdpa(
        self,
        func: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        trained_mask = attn_mask is not None and attn_mask.requires_grad
        if dropout_p or is_causal or enable_gqa or q.dim() != 4 or trained_mask:
            return super().sdpa(func, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if q.shape[-2] == 1:
            return func(q, k, v, attn_mask=attn_mask, scale=scale)
        with torch._C.DisableTorchFunction():
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            out, similarity = _Attention.apply(q, k, v, attn_mask, scale, self.tau, self.form, self.buffers)
        self.similarities.append(similarity)
        return out


CACHE_SIZE = 1 << 21  # elements of A that the cache of a CPU holds, or nearly: smaller slices need more calls


class _Attention(torch.autograd.Function):
    """softmax(s q kᵀ + mask) v, and the similarity of the rows of A.

    Head by head: the q, k and v of one head are matrices in place, so that no product copies them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        tau: float,
        form: str,
        buffers: Buffers,
    ) -> tuple[Tensor, Tensor]:
        level = tau if form == "per_head" else tau * q.shape[1]
        out = v.new_empty(v.shape[0], q.shape[2], v.shape[1], v.shape[3])
        out = out.transpose(1, 2)  # the memory layout of the fused kernel
        stored = q.new_empty(q.shape[1], len(q), q.shape[2], k.shape[2]) if _stores_maps(q, k) else None
        parts = []
        for b in _batch_slices(q, k):
            memory = _buffer(buffers, q, k) if stored is None else stored[:, b]
            heads = _attention_weights(q, k, mask, scale, b, memory)
            for h, a in enumerate(heads):
                torch.bmm(a, v[b, h], out=out[b, h])
            results = [_similarity(m, level, form) for m in _compared_maps(heads, form)]
            parts.append([torch.stack(values) for values in zip(*results, strict=True)])
        similarity, *saved = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, v, mask, stored, *saved)
        ctx.scale, ctx.level, ctx.form, ctx.buffers = scale, level, form, buffers
        return out, similarity.mean()

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_similarity: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, stored, *saved = ctx.saved_tensors
        weight = g_similarity / (len(saved[0]) * q.shape[0] * q.shape[2])
        # heads first in memory, so that the gradient of a head is written without a copy
        g_q, g_k, g_v = (x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]) for x in (q, k, v))
        for b in _batch_slices(q, k):
            buffer = _buffer(ctx.buffers, q, k)
            if stored is None:
                heads = _attention_weights(q, k, mask, ctx.scale, b, buffer)
            else:
                heads = list(stored[:, b])
            maps = _compared_maps(heads, ctx.form)
            slopes = [
                _similarity_gradient(m, values, weight, ctx.level, ctx.form)
                for m, *values in zip(maps, *(x[:, b] for x in saved), strict=True)
            ]
            for h, a in enumerate(heads):
                torch.bmm(a.transpose(1, 2), g_out[b, h], out=g_v[h, b])
                g = buffer[-1, : len(a)]
                slope = slopes[h % len(slopes)].to(a.dtype)
                torch.baddbmm(slope, g_out[b, h], v[b, h].transpose(1, 2), out=g)
                torch.ops.aten._softmax_backward_data.out(g, a, -1, a.dtype, grad_input=g)
                _scaled_product(g, k[b, h], ctx.scale, out=g_q[h, b])
                _scaled_product(g.transpose(1, 2), q[b, h], ctx.scale, out=g_k[h, b])
        return g_q.transpose(0, 1), g_k.transpose(0, 1), g_v.transpose(0, 1), None, None, None, None, None


def _batch_slices(q: Tensor, k: Tensor) -> list[slice]:
    """Images computed together: on a CPU as many as have their maps in its cache."""
    map_size = q.shape[1] * q.shape[2] * k.shape[2]
    size = max(1, CACHE_SIZE // map_size) if q.device.type == "cpu" else len(q)
    return [slice(start, start + size) for start in range(0, len(q), size)]


def _stores_maps(q: Tensor, k: Tensor) -> bool:
    """Whether A is stored for the backward pass: if it adds at most a quarter to what a block stores.

    A block of width H·d stores about 16 values of that width for each token; A has H·N values for each token.
    """
    return k.shape[2] <= 4 * q.shape[3]


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _buffer(buffers: Buffers, q: Tensor, k: Tensor) -> Float[Tensor, "_ b q k"]:
    """Memory for the maps of all heads and one more, reused: allocating costs as much as computing."""
    shape = (q.shape[1] + 1, _batch_slices(q, k)[0].stop, q.shape[2], k.shape[2])
    key = (shape, q.dtype, q.device)
    if key not in buffers:
        buffers[key] = q.new_empty(shape)
    return buffers[key]


def _attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, images: slice, buffer: Tensor
) -> list[Float[Tensor, "b q k"]]:
    """A of every head."""
    heads = []
    for h in range(q.shape[1]):
        query, key = q[images, h], k[images, h].transpose(1, 2)
        logits = buffer[h, : len(query)]
        torch.baddbmm(logits, query, key, beta=0, alpha=scale, out=logits)
        if mask is not None:
            m = mask.expand(*q.shape[:2], *mask.shape[-2:])[images, h]
            if m.dtype == torch.bool:
                logits.masked_fill_(~m, float("-inf"))
            else:
                logits.add_(m)
        heads.append(torch.softmax(logits, -1, out=logits))
    return heads


def _compared_maps(heads: list[Tensor], form: str) -> list[Float[Tensor, "b q k"]]:
    """The maps whose rows are compared: of each head, or their sum, which has the direction of the mean."""
    wide = torch.float32 if heads[0].dtype.itemsize < 4 else heads[0].dtype
    if form == "per_head" or len(heads) == 1:
        return [a.to(wide, copy=True) for a in heads]
    m = torch.add(heads[0].to(wide), heads[1])
    for a in heads[2:]:
        m += a
    return [m]


def _threshold_(m: Tensor, level: float, form: str) -> Tensor:
    """M where it reaches level / N, else 0; in place. ≥ t is > the largest number below t."""
    threshold = torch.tensor(level / m.shape[-1], dtype=m.dtype)
    below = threshold if form == "code" else torch.nextafter(threshold, torch.zeros_like(threshold))
    return F.threshold(m, below.item(), 0.0, inplace=True)


def _similarity(m: Float[Tensor, "b q k"], level: float, form: str) -> tuple[Tensor, ...]:
    """û · mean_i û_i of every map; and for the backward pass û, |m̂|, mean_i û_i and 1/|M̂_i|."""
    whole = _threshold_(m.mean(1), level, form) if form == "code" else None
    rows = _threshold_(m, level, form)
    inverse = torch.linalg.vector_norm(rows, dim=-1).clamp_min_(EPS).reciprocal_()
    coefficients = torch.stack([torch.ones_like(inverse), inverse], 1).div_(m.shape[1])
    row_mean, direction_mean = torch.bmm(coefficients, rows).unbind(1)
    mean_row = row_mean if whole is None else whole
    length = torch.linalg.vector_norm(mean_row, dim=-1, keepdim=True).clamp_min_(EPS)
    unit = mean_row / length
    return (unit * direction_mean).sum(-1), unit, length, direction_mean, inverse


def _similarity_gradient(
    m: Float[Tensor, "b q k"], saved: list[Tensor], weight: Tensor, level: float, form: str
) -> Float[Tensor, "b q k"]:
    """∂similarity/∂A.

    Through the mean row it is (ū − û(û·ū))/|m̂|, through each row (û − û_i(û_i·û))/|M̂_i|.
    """
    unit, length, direction_mean, inverse = saved
    whole = m.mean(1) if form == "code" else None
    rows = _threshold_(m, level, form)
    by_row = inverse * weight
    through_mean = (direction_mean - unit * (unit * direction_mean).sum(-1, keepdim=True)) / length * weight
    shared = through_mean if whole is None else torch.zeros_like(through_mean)
    slope = torch.addcmul(shared.unsqueeze(1), by_row.unsqueeze(-1), unit.unsqueeze(1))
    cosines = torch.bmm(rows, unit.unsqueeze(-1))  # (b, rows, 1), not yet divided by |M̂_i|
    slope.addcmul_(rows, cosines * (inverse.square() * by_row).unsqueeze(-1), value=-1)
    slope = torch.ops.aten.threshold_backward(slope, rows, 0.0)  # 0 where M̂ is
    if whole is not None:
        slope.add_((through_mean * (whole > level / m.shape[-1])).unsqueeze(1))
    return slope


def adl(
    attentions: Sequence[Float[Tensor, "_ _ _ _"]], *, tau: float = 2.0, form: str = "paper"
) -> Float[Tensor, ""]:
    """The loss of the attention of each layer, kept in the graph.

    Examples:
        >>> round(adl([torch.tensor([[[[0.9, 0.1], [0.9, 0.1]]]])], tau=1.0).item(), 6)
        1.0
    """
    expected = "adl: expected a sequence of (B, H, N, N) attentions, one for each layer"
    if not isinstance(attentions, Sequence) or not attentions:
        got = f"a {type(attentions).__name__}" if isinstance(attentions, Tensor) else repr(attentions)
        raise InputError(f"{expected}, got {got}")
    if form not in ("paper", "code", "per_head"):
        raise UnknownNameError("form", str(form), ("paper", "code", "per_head"))
    if not tau > 0:
        raise InputError(f"adl: tau must be above 0, got {tau}")
    for a in attentions:
        if not isinstance(a, Tensor) or a.dim() != 4:
            got = str(tuple(a.shape)) if isinstance(a, Tensor) else f"a {type(a).__name__}"
            raise InputError(f"{expected}, got {got}")
    maps = [a.flatten(0, 1) if form == "per_head" else a.mean(1) for a in attentions]
    total = torch.stack([row_similarity(m, tau, form) for m in maps]).sum()
    return total / layer_count(len(attentions), form)


def layer_count(layers: int, form: str) -> float:
    """What the sum over layers is divided by."""
    return layers + (1e-6 if form == "code" else 0.0)


def row_similarity(m: Float[Tensor, "b q k"], tau: float, form: str) -> Float[Tensor, ""]:
    """Mean over images and rows of cos(m̂, M̂_i), computed as û · mean_i û_i, which reads rows less often."""
    threshold = tau / m.shape[-1]
    if form == "code":
        rows = torch.where(m > threshold, m, 0.0)
        mean_row = m.mean(1)
        mean_row = torch.where(mean_row > threshold, mean_row, 0.0)
    else:
        rows = torch.where(m >= threshold, m, 0.0)
        mean_row = rows.mean(1)
    norms = rows.square().sum(-1).clamp_min(EPS**2).sqrt()
    mean_direction = torch.einsum("bq,bqk->bk", norms.reciprocal(), rows) / m.shape[1]
    length = mean_row.square().sum(-1).clamp_min(EPS**2).sqrt()
    return ((mean_row * mean_direction).sum(-1) / length).mean()


def seam_loss(seam: DiversitySeam) -> Float[Tensor, ""]:
    """The loss over all layers that ran while the seam was active."""
    kept = [a.a for a in seam.record.attention if a.a.dim() == 4 and a.a.shape[-2] > 1]
    layers = len(seam.similarities) + len(kept)
    if not layers:
        raise MethodUnavailableError(
            "adl: no attention between tokens was seen. It needs a vision transformer."
        )
    total = torch.stack(seam.similarities).sum() if seam.similarities else torch.zeros(())
    if kept:
        total = total + adl(kept, tau=seam.tau, form=seam.form) * layer_count(len(kept), seam.form)
    return total / layer_count(layers, seam.form)


class AdlOptions(LossOptions):
    tau: Positive = 2.0
    form: Literal["paper", "code", "per_head"] = "paper"


@register_loss("adl", options=AdlOptions)
class AttentionDiversification(Loss):
    """Attention diversification: queries of a layer should not attend to the same tokens (Guo 2023)."""

    options: AdlOptions

    def observer(self) -> DiversitySeam:
        return DiversitySeam(self.options.tau, self.options.form)

    def __call__(self, batch: LossBatch) -> Tensor:
        assert batch.outputs is not None  # the forward pass has run, observed
        return seam_loss(cast(DiversitySeam, batch.observers[self.name]))
