"""From layers to one map: last, rollout, plus, skipplus. They compose with every method that has layers.

| aggregator | map                                                                                        |
| first      | the map at layer 0 (what many bare names mean), or at layer `start`                        |
| last       | the map at the last layer, or at layer `start`                                             |
| plus       | Σ_{l ≥ start} map_l (PLUS, Mehri et al. 2024); start = 0                                   |
| skipplus   | the same from start = ⌈L/2⌉ (`cut="ceil"`, the paper) or ⌊L/2⌋ (`cut="floor"`, its code)    |
| rollout    | product of the layers' matrices in forward order, then the row that feeds the head         |

Layers of a hierarchical model have other grids: their maps are resized to the last one (bilinear) with their sum kept.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.method_registry import Method
from steadygaze.trace.capture import Trace


def first_layer(method: Method, depth: int) -> int:
    """The lowest layer whose map enters."""
    start = method.option("start")
    if start is not None:
        if start >= depth:
            raise BadInput(f"{method.name}: start={start}, but the model has layers 0..{depth - 1}")
        return start
    if method.aggregator == "skipplus":
        return min(depth // 2 if method.option("cut") == "floor" else -(-depth // 2), depth - 1)
    return depth - 1 if method.aggregator == "last" else 0


def layers(method: Method, depth: int) -> range:
    """The layers whose maps are added (or multiplied)."""
    first = first_layer(method, depth)
    return range(first, first + 1) if method.aggregator in ("first", "last") else range(first, depth)


def aggregate(trace: Trace, method: Method) -> Float[Tensor, "b h w"]:
    """The map of `method` from a trace."""
    base = method.base
    own = method.function_options
    span = layers(method, trace.depth)
    if base.kind == "matrix":
        row = _matrix_rows(trace, method, span, own)
        return row[:, trace.vit.prefix :].unflatten(1, trace.run.layout.grid)
    pieces = [piece for l in span if (piece := base.function(trace, l, **own)) is not None]
    if not pieces:
        raise BadInput(
            f"{method.name}: nothing is left to add up from layer {span[0]} of 0..{trace.depth - 1} on. Begin at a lower layer."
        )
    total: Any = sum(fit(piece, trace.run.layout.grid) for piece in pieces)
    if base.added_once is not None:
        total = total + sum(
            fit(piece, trace.run.layout.grid) for piece in base.added_once(trace, span[0], **own)
        )
    return total


def fit(image: Float[Tensor, "b h w"], grid: tuple[int, int]) -> Float[Tensor, "b gh gw"]:
    """Resize a map to `grid` (bilinear), its sum kept."""
    if tuple(image.shape[-2:]) == tuple(grid):
        return image
    wide = image.float() if image.dtype.itemsize < 4 else image  # no half precision on a CPU
    small = F.interpolate(wide[:, None], size=grid, mode="bilinear", align_corners=False, antialias=True)[
        :, 0
    ]
    small = small * (image.shape[-2] * image.shape[-1] / (grid[0] * grid[1]))
    lost = wide.sum((-2, -1), keepdim=True) - small.sum((-2, -1), keepdim=True)
    return (small + lost / (grid[0] * grid[1])).to(image.dtype)


def _matrix_rows(trace: Trace, method: Method, span: range, own: dict[str, Any]) -> Float[Tensor, "b n"]:
    """The aggregated row that feeds the head, over all tokens."""
    function = method.base.function
    pooled = trace.vit.readout == "pool" and len(trace.pooling) > 0
    if method.aggregator == "rollout":
        step = method.base.rollout_step or _unchanged
        product: Tensor | None = None
        for l in span:
            m = step(function(trace, l, **own), **own)
            product = m if product is None else m @ product
        assert product is not None
        if pooled:
            return _pool_rollout(trace, method, product)
        return torch.einsum("i,bij->bj", trace.readout_row()[0], product)
    row = _pool_row(trace, method) if pooled else trace.readout_row().expand(trace.logits.shape[0], -1)
    total = row if pooled and method.aggregator != "first" else torch.zeros_like(row)
    if not (pooled and method.aggregator == "last"):
        read = method.base.read_row or _unchanged
        for l in span:
            total = total + read(torch.einsum("bi,bij->bj", row, function(trace, l, **own)), **own)
    return total


def _unchanged(m: Tensor, **own: Any) -> Tensor:
    return m


def _mean_attention(a: Tensor, g: Tensor, **own: Any) -> Tensor:
    return a.mean(1)


def _pool_attentions(trace: Trace, method: Method) -> list[tuple[Tensor, Tensor]]:
    """(self weight, row over the tokens) of each attention of the head, fused over heads as the method does."""
    n, prefix = trace.run.hidden[-1].shape[1], trace.vit.prefix
    fuse = method.base.fuse_heads or _mean_attention
    pieces = []
    for attention in trace.pooling:
        m = fuse(
            trace.seen(attention), trace.grad(attention.a), **method.function_options
        )  # (B, queries, keys)
        row = m.mean(1)
        own_weight = row.new_zeros(row.shape[0], 1)
        if row.shape[1] == n + 1:  # class-attention: the query's own token comes first
            own_weight, row = row[:, :1], row[:, 1:]
        elif row.shape[1] == n - prefix:
            row = F.pad(row, (prefix, 0))
        pieces.append((own_weight, row))
    return pieces


def _pool_row(trace: Trace, method: Method) -> Float[Tensor, "b n"]:
    """What the pooling reads of each token, in one row."""
    return torch.stack([row for _, row in _pool_attentions(trace, method)]).sum(0)


def _pool_rollout(trace: Trace, method: Method, product: Tensor) -> Float[Tensor, "b n"]:
    """The pooling as one more layer of the rollout: the query starts empty and takes from the tokens (and from itself)."""
    residual = method.base.pool_residual
    query = torch.zeros_like(product[:, 0])
    for self_weight, row in _pool_attentions(trace, method):
        taken = self_weight * query + torch.einsum("bi,bij->bj", row, product)
        query = residual[0] * query + residual[1] * taken
    return query
