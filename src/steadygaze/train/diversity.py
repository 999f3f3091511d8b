"""Attention diversification from fused attention: no layer's maps outlive the layer (NUMERICS 8.2).

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
from steadygaze.train.losses import EPS, adl, check_adl


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

    def sdpa(self, func: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
             is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if dropout_p or is_causal or enable_gqa or q.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
            return super().sdpa(func, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if q.shape[-2] == 1:
            return func(q, k, v, attn_mask=attn_mask, scale=scale)
        with torch._C.DisableTorchFunction():
            out, similar = _Attend.apply(q, k, v, attn_mask, q.shape[-1] ** -0.5 if scale is None else scale, self.tau, self.form)
        self.similarities.append(similar)
        return out

    def loss(self) -> Float[Tensor, ""]:
        """Mean over all layers of how much their queries look at the same tokens; see `losses.adl`."""
        seen = [a.a for a in self.record.attention if a.a.dim() == 4 and a.a.shape[-2] > 1]
        layers = len(self.similarities) + len(seen)
        if not layers:
            raise MethodUnavailable("adl: the model showed no attention between its tokens. It needs a transformer.")
        total = torch.stack(self.similarities).sum() if self.similarities else torch.zeros(())
        if seen:
            total = total + adl(seen, tau=self.tau, form=self.form) * (len(seen) + (1e-6 if self.form == "code" else 0.0))  # type: ignore[arg-type]
        return total / (layers + (1e-6 if self.form == "code" else 0.0))


class _Attend(torch.autograd.Function):
    """softmax(s q kᵀ + mask) v, and the similarity of the rows of A."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, tau: float,
                form: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        a = _weights(q, k, mask, scale)
        similar, kept = _similar(a, tau, form)
        ctx.save_for_backward(q, k, v, mask, *kept)
        ctx.scale, ctx.tau, ctx.form = scale, tau, form
        return a @ v, similar

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_similar: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, *kept = ctx.saved_tensors
        a = _weights(q, k, mask, ctx.scale)
        g_v = a.transpose(-2, -1) @ g_out
        g = g_out @ v.transpose(-2, -1)
        _add_slope(g, a, kept, g_similar, ctx.tau, ctx.form)
        torch.ops.aten._softmax_backward_data.out(g, a, -1, a.dtype, grad_input=g)
        return g @ (k * ctx.scale), g.transpose(-2, -1) @ (q * ctx.scale), g_v, None, None, None, None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Float[Tensor, "b h n n"]:
    logits = (q * scale) @ k.transpose(-2, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return torch.softmax(logits, -1, out=logits)


def _joined(a: Float[Tensor, "b h n n"], form: str) -> Float[Tensor, "m n n"]:
    """The maps that are compared: of each head, or their mean, which may be changed in place."""
    wide = torch.float32 if a.dtype.itemsize < 4 else a.dtype
    return a.flatten(0, 1).to(wide, copy=True) if form == "per_head" else a.mean(1, dtype=wide)


def _cut_(m: Tensor, tau: float, form: str) -> Tensor:
    """M where it reaches the threshold, else 0; in place. ≥ t is > the number just below t."""
    threshold = torch.tensor(tau / m.shape[-1], dtype=m.dtype)
    below = threshold if form == "code" else torch.nextafter(threshold, torch.zeros_like(threshold))
    return F.threshold(m, below.item(), 0.0, inplace=True)


def _similar(a: Tensor, tau: float, form: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """û · mean_i û_i, mean over the maps; kept for the backward pass: û, |m̂|, mean_i û_i and 1/|M̂_i|."""
    m = _joined(a, form)
    middle = _cut_(m.mean(1), tau, form) if form == "code" else None
    seen = _cut_(m, tau, form)
    middle = seen.mean(1) if middle is None else middle
    inverse = torch.linalg.vector_norm(seen, dim=-1).clamp_min_(EPS).reciprocal_()
    mean = torch.bmm(inverse.unsqueeze(1), seen)[:, 0] / m.shape[1]
    length = torch.linalg.vector_norm(middle, dim=-1, keepdim=True).clamp_min_(EPS)
    unit = middle / length
    return (unit * mean).sum(-1).mean(), (unit, length, mean, inverse)


def _add_slope(g: Tensor, a: Tensor, kept: list[Tensor], g_similar: Tensor, tau: float, form: str) -> None:
    """Add ∂similarity/∂A to `g`: through the mean row, (ū − û(û·ū))/|m̂|, and through each row, (û − û_i(û_i·û))/|M̂_i|."""
    unit, length, mean, inverse = kept
    m = _joined(a, form)
    maps, rows, columns = m.shape
    weight = g_similar / (maps * rows) / (1 if form == "per_head" else a.shape[1])
    whole = m.mean(1) if form == "code" else None
    seen = _cut_(m, tau, form)
    by_row = inverse * weight
    through_mean = (mean - unit * (unit * mean).sum(-1, keepdim=True)) / length * weight
    shared = through_mean if whole is None else torch.zeros_like(through_mean)
    slope = torch.addcmul(shared.unsqueeze(1), by_row.unsqueeze(-1), unit.unsqueeze(1))
    cosines = torch.bmm(seen, unit.unsqueeze(-1))  # (m, rows, 1), not yet divided by |M̂_i|
    slope.addcmul_(seen, cosines * (inverse.square() * by_row).unsqueeze(-1), value=-1)
    slope = torch.ops.aten.threshold_backward(slope, seen, 0.0)  # 0 where M̂ is
    if whole is not None:
        slope.add_((through_mean * (whole > tau / columns)).unsqueeze(1))
    slope = slope.to(g.dtype)
    if form == "per_head":
        g.view_as(slope).add_(slope)
    else:
        g.add_(slope.unsqueeze(1))
