"""The attention diversification loss (ADL; Guo et al. 2023): queries of a layer should not all attend to the
same tokens.

Equations: docs/equations.md#adl.

    M = mean over heads of A      t = τ / N      M̂ = M where M ≥ t, else 0      m̂ = mean_i M̂_i
    loss = mean over layers, images and rows i of cos(m̂, M̂_i)              0..1, lower is more diverse

form: "paper" as above (equations 1 and 2); "code" thresholds by >, takes m̂ from the mean of the whole rows
where that exceeds t, and divides by the number of layers + 1e-6; "per_head" is "paper" for each head by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput, MethodUnavailable, UnknownName
from steadygaze.training.losses.fused_adl import EPS, DiversitySeam
from steadygaze.training.losses.registry import Loss, LossBatch, LossOptions, Positive, register_loss


def adl(
    attentions: Sequence[Float[Tensor, "_ _ _ _"]], *, tau: float = 2.0, form: str = "paper"
) -> Float[Tensor, ""]:
    """The loss of the attention of each layer, kept in the graph.

    >>> round(adl([torch.tensor([[[[0.9, 0.1], [0.9, 0.1]]]])], tau=1.0).item(), 6)
    1.0
    """
    if isinstance(attentions, Tensor):
        got = f"one tensor {tuple(attentions.shape)}"
        raise BadInput(f"adl: expected a sequence of (B, H, N, N) attentions, one for each layer, got {got}")
    if not isinstance(attentions, Sequence) or not attentions:
        got = "none" if not attentions else repr(attentions)
        raise BadInput(f"adl: expected a sequence of (B, H, N, N) attentions, one for each layer, got {got}")
    if form not in ("paper", "code", "per_head"):
        raise UnknownName("form", str(form), ("paper", "code", "per_head"))
    if not tau > 0:
        raise BadInput(f"adl: tau must be above 0, got {tau}")
    for a in attentions:
        if not isinstance(a, Tensor) or a.dim() != 4:
            got = str(tuple(a.shape)) if isinstance(a, Tensor) else f"a {type(a).__name__}"
            raise BadInput(f"adl: expected tensors of shape (B, H, N, N), got {got}")
    maps = [a.flatten(0, 1) if form == "per_head" else a.mean(1) for a in attentions]
    total = torch.stack([row_similarity(m, tau, form) for m in maps]).sum()
    return total / layer_count(len(attentions), form)


def layer_count(layers: int, form: str) -> float:
    """What the sum over layers is divided by."""
    return layers + (1e-6 if form == "code" else 0.0)


def row_similarity(m: Float[Tensor, "b q k"], tau: float, form: str) -> Float[Tensor, ""]:
    """mean over images and rows of cos(m̂, M̂_i), computed as û · mean_i û_i, which reads the rows only a few
    times."""
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
        raise MethodUnavailable("adl: no attention between tokens was seen. It needs a vision transformer.")
    total = torch.stack(seam.similarities).sum() if seam.similarities else torch.zeros(())
    if kept:
        total = total + adl(kept, tau=seam.tau, form=seam.form) * layer_count(len(kept), seam.form)
    return total / layer_count(layers, seam.form)


class AdlOptions(LossOptions):
    tau: Positive = 2.0
    form: Literal["paper", "code", "per_head"] = "paper"


@register_loss("adl", options=AdlOptions)
class AttentionDiversification(Loss):
    """Attention diversification: queries of a layer should not attend to the same tokens (Guo et al.
    2023)."""

    options: AdlOptions

    def observer(self) -> DiversitySeam:
        seam = DiversitySeam(self.options.tau, self.options.form)
        seam.lenient = True  # attention pooling is not attention between tokens
        return seam

    def __call__(self, batch: LossBatch) -> Tensor:
        assert batch.outputs is not None  # the forward pass has run, observed
        return seam_loss(cast(DiversitySeam, batch.observers[self.name]))
