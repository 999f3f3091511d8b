"""Attention diversification from fused attention: no layer's maps outlive the layer (docs/equations.md#adl).

A `DiverseSeam` answers scaled_dot_product_attention by one function of its own that gives A·v and the layer's similarity. It keeps
q, k and v, as the fused kernel does, and makes A again in the backward pass: the cost is that of the similarity alone. Where a model
writes its attention out (softmax), or drops some of it, the maps are in the graph anyway and `losses.adl` reads them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import MethodUnavailable
from steadygaze.trace import PLAIN, Record, Seam, Want
from steadygaze.training.losses.losses import EPS, adl, check_adl


class DiverseSeam(Seam):
    """Active during the model's own forward pass; `loss()` afterwards is the attention diversification loss over its layers.

    Attentions with a single query (class attention, pooling) are no token attention and are left out.
    """

    def __init__(self, tau: float = 2.0, form: str = "paper") -> None:
        check_adl(tau, form)
        super().__init__(PLAIN, Want(hidden=False, attention=True))
        self.tau, self.form = tau, form
        self.record = Record()
        self.similarities: list[Float[Tensor, ""]] = []
        self.room: dict[Any, Tensor] = {}

    def sdpa(self, func: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
             is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if (
            dropout_p
            or is_causal
            or enable_gqa
            or q.dim() != 4
            or (attn_mask is not None and attn_mask.requires_grad)
        ):
            return super().sdpa(func, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if q.shape[-2] == 1:
            return func(q, k, v, attn_mask=attn_mask, scale=scale)
        with torch._C.DisableTorchFunction():
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            out, similar = _Attend.apply(q, k, v, attn_mask, scale, self.tau, self.form, self.room)
        self.similarities.append(similar)
        return out

    def loss(self) -> Float[Tensor, ""]:
        """Mean over all layers of how much their queries look at the same tokens; see `losses.adl`."""
        seen = [a.a for a in self.record.attention if a.a.dim() == 4 and a.a.shape[-2] > 1]
        layers = len(self.similarities) + len(seen)
        if not layers:
            raise MethodUnavailable(
                "adl: the model showed no attention between its tokens. It needs a transformer."
            )
        total = torch.stack(self.similarities).sum() if self.similarities else torch.zeros(())
        if seen:
            scale = len(seen) + (1e-6 if self.form == "code" else 0.0)
            total = total + adl(seen, tau=self.tau, form=self.form) * scale  # type: ignore[arg-type]
        return total / (layers + (1e-6 if self.form == "code" else 0.0))


CACHED = 1 << 19  # numbers of A that a CPU's cache holds


class _Attend(torch.autograd.Function):
    """softmax(s q kᵀ + mask) v, and the similarity of the rows of A.

    Head by head: a head's q, k and v are matrices where they lie, so that no product needs a copy of them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, tau: float,
                form: str, room: dict[Any, Tensor]) -> tuple[Tensor, Tensor]:  # fmt: skip
        level = tau if form == "per_head" else tau * q.shape[1]
        out = v.new_empty(v.shape[0], q.shape[2], v.shape[1], v.shape[3]).transpose(
            1, 2
        )  # laid out as the fused kernel does
        found = []
        for b in _spans(q, k):
            heads = _weights(q, k, mask, scale, b, _room(room, q, k))
            for h, a in enumerate(heads):
                out[b, h] = a @ v[b, h]
            found += [
                [
                    torch.stack(x)
                    for x in zip(*(_similar(m, level, form) for m in _joined(heads, form)), strict=True)
                ]
            ]
        similar, *kept = (torch.cat(x, dim=1) for x in zip(*found, strict=True))
        ctx.save_for_backward(q, k, v, mask, *kept)
        ctx.scale, ctx.level, ctx.form, ctx.room = scale, level, form, room
        return out, similar.mean()

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_similar: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, *kept = ctx.saved_tensors
        weight = g_similar / (len(kept[0]) * q.shape[0] * q.shape[2])
        g_q, g_k, g_v = (
            x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]) for x in (q, k, v)
        )  # a head's lie side by side: no copies
        for b in _spans(q, k):
            room = _room(ctx.room, q, k)
            heads = _weights(q, k, mask, ctx.scale, b, room)
            some = (x[:, b] for x in kept)
            slopes = [
                _slope(m, each, weight, ctx.level, ctx.form)
                for m, *each in zip(_joined(heads, ctx.form), *some, strict=True)
            ]
            for h, a in enumerate(heads):
                torch.bmm(a.transpose(1, 2), g_out[b, h], out=g_v[h, b])
                g = room[-1, : len(a)]
                torch.baddbmm(
                    slopes[h % len(slopes)].to(a.dtype), g_out[b, h], v[b, h].transpose(1, 2), out=g
                )
                torch.ops.aten._softmax_backward_data.out(g, a, -1, a.dtype, grad_input=g)
                _product(g, k[b, h], ctx.scale, out=g_q[h, b])
                _product(g.transpose(1, 2), q[b, h], ctx.scale, out=g_k[h, b])
        return g_q.transpose(0, 1), g_k.transpose(0, 1), g_v.transpose(0, 1), None, None, None, None, None


def _spans(q: Tensor, k: Tensor) -> list[slice]:
    """Pictures that are taken together: on a CPU those whose maps its cache holds."""
    size = max(1, CACHED // (q.shape[1] * q.shape[2] * k.shape[2])) if q.device.type == "cpu" else len(q)
    return [slice(start, start + size) for start in range(0, len(q), size)]


def _product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _room(kept: dict[Any, Tensor], q: Tensor, k: Tensor) -> Float[Tensor, "h+1 b n n"]:
    """Memory for the maps of the heads and one more, used again by every span and layer: fresh memory costs as much as the work in it."""
    shape = (q.shape[1] + 1, _spans(q, k)[0].stop, q.shape[2], k.shape[2])
    key = (shape, q.dtype, q.device)
    if key not in kept:
        kept[key] = q.new_empty(shape)
    return kept[key]


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, pictures: slice, room: Tensor
) -> list[Float[Tensor, "b n n"]]:
    """A of every head."""
    heads = []
    for h in range(q.shape[1]):
        query, key = q[pictures, h], k[pictures, h].transpose(1, 2)
        logits = room[h, : len(query)]
        torch.baddbmm(logits, query, key, beta=0, alpha=scale, out=logits)
        if mask is not None:
            m = mask.expand(*q.shape[:2], *mask.shape[-2:])[pictures, h]
            logits.masked_fill_(~m, float("-inf")) if m.dtype == torch.bool else logits.add_(m)
        heads.append(torch.softmax(logits, -1, out=logits))
    return heads


def _joined(heads: list[Tensor], form: str) -> list[Float[Tensor, "b n n"]]:
    """The maps that are compared: of each head, or their sum, whose rows point as those of the mean; they may be changed in place."""
    wide = torch.float32 if heads[0].dtype.itemsize < 4 else heads[0].dtype
    if form == "per_head" or len(heads) == 1:
        return [a.to(wide, copy=True) for a in heads]
    m = torch.add(heads[0].to(wide), heads[1])
    for a in heads[2:]:
        m += a
    return [m]


def _cut_(m: Tensor, level: float, form: str) -> Tensor:
    """M where it reaches level / N, else 0; in place. ≥ t is > the number just below t."""
    threshold = torch.tensor(level / m.shape[-1], dtype=m.dtype)
    below = threshold if form == "code" else torch.nextafter(threshold, torch.zeros_like(threshold))
    return F.threshold(m, below.item(), 0.0, inplace=True)


def _similar(m: Float[Tensor, "b n n"], level: float, form: str) -> tuple[Tensor, ...]:
    """û · mean_i û_i of every map; and for the backward pass û, |m̂|, mean_i û_i and 1/|M̂_i|."""
    whole = _cut_(m.mean(1), level, form) if form == "code" else None
    seen = _cut_(m, level, form)
    inverse = torch.linalg.vector_norm(seen, dim=-1).clamp_min_(EPS).reciprocal_()
    plain, mean = torch.bmm(
        torch.stack([torch.ones_like(inverse), inverse], 1).div_(m.shape[1]), seen
    ).unbind(1)
    middle = plain if whole is None else whole
    length = torch.linalg.vector_norm(middle, dim=-1, keepdim=True).clamp_min_(EPS)
    unit = middle / length
    return (unit * mean).sum(-1), unit, length, mean, inverse


def _slope(
    m: Float[Tensor, "b n n"], kept: list[Tensor], weight: Tensor, level: float, form: str
) -> Float[Tensor, "b n n"]:
    """∂similarity/∂A: through the mean row, (ū − û(û·ū))/|m̂|, and through each row, (û − û_i(û_i·û))/|M̂_i|."""
    unit, length, mean, inverse = kept
    whole = m.mean(1) if form == "code" else None
    seen = _cut_(m, level, form)
    by_row = inverse * weight
    through_mean = (mean - unit * (unit * mean).sum(-1, keepdim=True)) / length * weight
    shared = through_mean if whole is None else torch.zeros_like(through_mean)
    slope = torch.addcmul(shared.unsqueeze(1), by_row.unsqueeze(-1), unit.unsqueeze(1))
    cosines = torch.bmm(seen, unit.unsqueeze(-1))  # (b, rows, 1), not yet divided by |M̂_i|
    slope.addcmul_(seen, cosines * (inverse.square() * by_row).unsqueeze(-1), value=-1)
    slope = torch.ops.aten.threshold_backward(slope, seen, 0.0)  # 0 where M̂ is
    if whole is not None:
        slope.add_((through_mean * (whole > level / m.shape[-1])).unsqueeze(1))
    return slope
