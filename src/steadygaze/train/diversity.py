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
        out = a @ v
        ctx.save_for_backward(q, k, v, mask, *kept)
        ctx.scale, ctx.tau, ctx.form = scale, tau, form
        return out, similar

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_similar: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, *kept = ctx.saved_tensors
        a = _weights(q, k, mask, ctx.scale)
        g_v = a.transpose(-2, -1) @ g_out
        g = g_out @ v.transpose(-2, -1)
        _add_slope(g, a, kept, g_similar, ctx.tau, ctx.form)
        inner = torch.linalg.vecdot(g, a).unsqueeze_(-1)
        g = g.sub_(inner).mul_(a).mul_(ctx.scale)
        return g @ k, g.transpose(-2, -1) @ q, g_v, None, None, None, None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Float[Tensor, "b h n n"]:
    logits = (q * scale) @ k.transpose(-2, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return F.softmax(logits, dim=-1)


def _joined(a: Float[Tensor, "b h n n"], form: str) -> Float[Tensor, "m n n"]:
    return a.flatten(0, 1) if form == "per_head" else a.mean(1)


def _cut(m: Tensor, tau: float, form: str) -> Tensor:
    """M where it reaches the threshold, else 0."""
    return F.threshold(m, tau / m.shape[-1], 0.0) if form == "code" else m * (m >= tau / m.shape[-1])


def _similar(a: Tensor, tau: float, form: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """û · mean_i û_i, mean over the maps; kept for the backward pass: û, |m̂|, mean_i û_i, 1/|M̂_i| and û_i·û."""
    m = _joined(a, form)
    seen = _cut(m, tau, form)
    middle = _cut(m.mean(1), tau, form) if form == "code" else seen.mean(1)
    inverse = torch.linalg.vector_norm(seen, dim=-1).clamp_min_(EPS).reciprocal_()
    mean = torch.bmm(inverse.unsqueeze(1), seen)[:, 0] / m.shape[1]
    length = torch.linalg.vector_norm(middle, dim=-1, keepdim=True).clamp_min_(EPS)
    unit = middle / length
    cosines = torch.bmm(seen, unit.unsqueeze(-1))[..., 0] * inverse
    return (unit * mean).sum(-1).mean(), (unit, length, mean, inverse, cosines)


def _add_slope(g: Tensor, a: Tensor, kept: list[Tensor], g_similar: Tensor, tau: float, form: str) -> None:
    """Add ∂similarity/∂A to `g`: through the mean row, (ū − û(û·ū))/|m̂|, and through each row, (û − û_i(û_i·û))/|M̂_i|."""
    unit, length, mean, inverse, cosines = kept
    m = _joined(a, form)
    maps, n, _ = m.shape
    weight = g_similar / (maps * n)
    seen = _cut(m, tau, form)
    through_mean = (mean - unit * (unit * mean).sum(-1, keepdim=True)) / length
    slope = torch.addcmul(inverse.unsqueeze(-1) * unit.unsqueeze(1), seen, (cosines * inverse.square()).unsqueeze(-1), value=-1)
    if form == "code":
        slope = slope * (seen > 0) + (through_mean * (m.mean(1) > tau / n)).unsqueeze(1)
    else:
        slope = (slope + through_mean.unsqueeze(1)) * (m >= tau / m.shape[-1])
    slope = slope.mul_(weight)
    if form == "per_head":
        g.view_as(slope).add_(slope)
    else:
        g.add_(slope.div_(a.shape[1]).unsqueeze(1))
