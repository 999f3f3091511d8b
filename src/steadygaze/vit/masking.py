"""Attention masking: hides patches from models that need their whole grid (Swin, PVT, MViT, ...).

A hidden token is NaN. What works on each token alone carries the NaN along; only what mixes tokens is
answered here, so that nothing of a hidden token reaches another one:

    attention     hidden keys get weight zero, in windows and shifted windows too; hidden queries stay hidden
    mean          over the tokens that are there
    convolution, pooling     hidden cells count as zero (maximum: −∞), and are marked again in the output
    interpolation            between the visible cells

A map's cell covers whole tokens on every finer grid; on a coarser grid (reduced keys) a place is there if
any of its cells is. For a plain ViT this equals removal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.vit.intercept import MATMUL, MEAN, SOFTMAX, Interception, TorchFunction
from steadygaze.vit.view import ViT, remember

NAN = float("nan")
CONV = (F.conv2d, torch.conv2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.fold)
MAXPOOL = (torch.max_pool2d, F.max_pool2d)


def masked_logits(
    vit: ViT,
    tokens: Float[Tensor, "b n d"],
    keep: Bool[Tensor, "s gh gw"],
    image: Int[Tensor, " s"] | None = None,
) -> Float[Tensor, "s classes"]:
    """Logits with only the cells `keep` of the map's grid visible; row s belongs to image[s] (default: s)."""
    layout = vit.layout(tokens)
    rows = torch.arange(len(keep), device=tokens.device) if image is None else image
    x = tokens[rows].clone()
    where = token_indices(vit, tokens)
    hidden = ~at(keep, (where.shape[0], where.shape[1]))
    flat = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    flat[:, where.flatten()] = hidden.flatten(1)
    x[flat] = NAN
    with _Missing(keep):
        logits = vit.logits(remember(x, layout))
    seen = keep.flatten(1).any(1)
    if not torch.isfinite(logits[seen]).all():
        raise MethodUnavailableError(
            f"patches of a {vit.plan.kind} can be neither removed nor masked: it mixes them in an unknown "
            "way. Use metrics that fill pixels, such as positive_perturbation."
        )
    return logits


def token_indices(vit: ViT, tokens: Float[Tensor, "b n d"]) -> Int[Tensor, "h w"]:
    """The index of the token at each cell of the first block's grid."""
    place = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float64)[None, :, None]
    return vit.blocks[0].patches(place, vit.layout(tokens))[0, :, :, 0].long()


def at(keep: Bool[Tensor, "s gh gw"], grid: tuple[int, int]) -> Bool[Tensor, "s h w"]:
    """`keep` on another grid: on a finer one the same cells, on a coarser one where any cell is kept."""
    if tuple(keep.shape[-2:]) == tuple(grid):
        return keep
    finer = grid[0] >= keep.shape[-2] and grid[1] >= keep.shape[-1]
    image = keep[:, None].float()
    other = F.interpolate(image, size=grid, mode="nearest") if finer else F.adaptive_max_pool2d(image, grid)
    return other[:, 0] > 0.5


class _Missing(Interception):
    """Treats NaN as "hidden" in everything that mixes tokens."""

    def __init__(self, keep: Tensor) -> None:
        super().__init__()
        self.keep = keep
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("mha", F.multi_head_attention_forward)
        self.intercept("normalize", F.normalize)
        self.intercept("carried", torch.Tensor.to, F.dropout)
        self.intercept("mean", *MEAN)
        self.intercept("pooled", F.adaptive_avg_pool1d)
        self.intercept("softmax", *SOFTMAX)
        self.intercept("matmul", *MATMUL)
        self.intercept("convolution", *CONV)
        self.intercept("maximum", *MAXPOOL)
        self.intercept("interpolation", F.interpolate)

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        there = ~k.isnan().any(-1)[..., None, :]  # (b, h, 1, keys)
        if attn_mask is None or attn_mask.dtype == torch.bool:
            mask = there if attn_mask is None else there & attn_mask
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
        else:
            mask = (
                attn_mask.expand(there.shape[0], *attn_mask.shape[-3:]) if attn_mask.dim() == 4 else attn_mask
            )
            mask = mask.masked_fill(~there, float("-inf"))
        hidden = q.isnan().any(-1, keepdim=True)
        out = func(q.nan_to_num(), k.nan_to_num(), v.nan_to_num(), attn_mask=mask, **kwargs)
        return out.masked_fill(hidden, NAN)

    def softmax(
        self, func: TorchFunction, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Eager attention: a column of NaN is a hidden key, a row of NaN a hidden query."""
        y = func(x.masked_fill(x.isnan(), float("-inf")), dim, *args, **kwargs)
        y.weights_ = True
        return y

    def matmul(self, func: TorchFunction, a: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        """A·v: hidden values have weight zero. In attention over channels (XCiT) they stay hidden."""
        gone = v.isnan()
        by_row = getattr(a, "weights_", False) and torch.equal(gone.any(-1), gone.all(-1))
        return func(a, v.nan_to_num() if by_row else v, **kwargs)

    def carried(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention weights keep their tag in another dtype, and behind dropout that does nothing."""
        y = func(x, *args, **kwargs)
        if getattr(x, "weights_", False):
            y.weights_ = True
        return y

    def normalize(
        self, func: TorchFunction, x: Tensor, p: float = 2.0, dim: int = 1, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Along tokens, over the visible ones; along channels a hidden token stays hidden."""
        gone = x.isnan()
        return func(x.masked_fill(gone & ~gone.all(dim, keepdim=True), 0.0), p, dim, *args, **kwargs)

    def mean(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.nanmean(x, *args, **kwargs)

    def pooled(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A mean over the visible tokens of (b, c, n)."""
        gone = x.isnan()
        return func(x.masked_fill(gone, 0.0), *args, **kwargs) / func((~gone).to(x.dtype), *args, **kwargs)

    def convolution(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        gone = x.isnan()
        y = func(x.masked_fill(gone, 0.0), *args, **kwargs)
        if func is F.adaptive_avg_pool2d:  # a mean over the visible cells
            y = y / func((~gone).to(x.dtype), *args, **kwargs)
        return self.mark(y)

    def maximum(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.mark(func(x.masked_fill(x.isnan(), float("-inf")), *args, **kwargs))

    def interpolation(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Weights of hidden cells are distributed over the visible ones of the same output cell."""
        gone = x.isnan()
        if not gone.any():  # a table of positions
            return func(x, *args, **kwargs)
        weight = func((~gone).to(x.dtype), *args, **kwargs)
        return self.mark(func(x.masked_fill(gone, 0.0), *args, **kwargs) / weight)

    def mark(self, y: Tensor) -> Tensor:
        """Mark the hidden cells of (b, c, h, w) again; heads may have been folded into the batch."""
        there = at(self.keep, (y.shape[-2], y.shape[-1])).repeat_interleave(y.shape[0] // len(self.keep), 0)
        return y.masked_fill(~there[:, None], NAN)
