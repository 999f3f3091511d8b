"""From layers to one map: last, rollout, plus, skipplus. They compose with every method that has layers.

| aggregator | map                                                                                     |
| first      | the map at layer 0 (what many bare names mean), or at layer `start`                     |
| last       | the map at the last layer, or at layer `start`                                          |
| plus       | Σ_{l ≥ start} map_l (PLUS, Mehri et al. 2024); start = 0                                |
| skipplus   | the same from start = ⌈L/2⌉ (`cut="ceil"`, the paper) or ⌊L/2⌋ (`cut="floor"`, its code) |
| rollout    | product of the layers' matrices in forward order, then the row that feeds the head      |

Formulas: docs/equations.md#plus, docs/equations.md#skipplus, docs/equations.md#rollout. Layers of a hierarchical model
lie on different grids: their maps are resized to the last one, keeping their sum (docs/equations.md#resize-maps).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.method_registry import Method
from steadygaze.trace.capture import Trace
from steadygaze.trace.resize import resize_map


def first_layer(method: Method, depth: int) -> int:
    """The lowest layer that contributes."""
    start = method.option("start")
    if start is not None:
        if start >= depth:
            raise BadInput(f"{method.name}: start={start}, but the model has layers 0..{depth - 1}")
        return start
    if method.aggregator == "skipplus":
        middle = depth // 2 if method.option("cut") == "floor" else -(-depth // 2)
        return min(middle, depth - 1)
    return depth - 1 if method.aggregator == "last" else 0


def layers(method: Method, depth: int) -> range:
    """The layers whose maps are added or multiplied."""
    first = first_layer(method, depth)
    return range(first, first + 1) if method.aggregator in ("first", "last") else range(first, depth)


def aggregate(trace: Trace, method: Method) -> Float[Tensor, "b h w"]:
    """The map of `method` from a trace."""
    base, options = method.base, method.function_options
    grid = trace.run.layout.grid
    chosen = layers(method, trace.depth)
    if base.kind == "matrix":
        row = _matrix_row(trace, method, chosen)
        return row[:, trace.vit.prefix :].unflatten(1, grid)
    maps = [image for l in chosen if (image := base.function(trace, l, **options)) is not None]
    if not maps:
        raise BadInput(
            f"{method.name}: there is no map to add from layer {chosen[0]} of 0..{trace.depth - 1} on. "
            f"Start at a lower layer."
        )
    total = _sum_resized(maps, grid)
    extra = [] if base.added_once is None else base.added_once(trace, chosen[0], **options)
    if extra:
        total = total + _sum_resized(extra, grid)
    return total


def _sum_resized(maps: Sequence[Float[Tensor, "b _ _"]], grid: tuple[int, int]) -> Float[Tensor, "b h w"]:
    total = resize_map(maps[0], grid)
    for image in maps[1:]:
        total = total + resize_map(image, grid)
    return total


def _matrix_row(trace: Trace, method: Method, chosen: range) -> Float[Tensor, "b n"]:
    """The aggregated row that feeds the head, over all tokens."""
    function, options = method.base.function, method.function_options
    pooled = trace.vit.readout == "pool" and len(trace.pooling) > 0
    if method.aggregator == "rollout":
        step = method.base.rollout_step or _unchanged
        product: Tensor | None = None
        for l in chosen:
            factor = step(function(trace, l, **options), **options)
            product = factor if product is None else factor @ product
        assert product is not None
        if pooled:
            return _pool_rollout(trace, method, product)
        return torch.einsum("i,bij->bj", trace.readout_row()[0], product)
    row = _pool_row(trace, method) if pooled else trace.readout_row().expand(trace.logits.shape[0], -1)
    total = row if pooled and method.aggregator != "first" else torch.zeros_like(row)
    if pooled and method.aggregator == "last":
        return total  # the pooling is the last layer
    read = method.base.read_row or _unchanged
    for l in chosen:
        total = total + read(torch.einsum("bi,bij->bj", row, function(trace, l, **options)), **options)
    return total


def _unchanged(m: Tensor, **options: Any) -> Tensor:
    return m


def _mean_attention(a: Tensor, g: Tensor, **options: Any) -> Tensor:
    return a.mean(1)


def _pool_attentions(trace: Trace, method: Method) -> list[tuple[Tensor, Tensor]]:
    """(self weight, row over the tokens) of each attention of the head, heads fused as the method does."""
    tokens, prefix = trace.run.hidden[-1].shape[1], trace.vit.prefix
    fuse = method.base.fuse_heads or _mean_attention
    pieces = []
    for attention in trace.pooling:
        fused = fuse(trace.seen(attention), trace.grad(attention.a), **method.function_options)
        row = fused.mean(1)  # (B, queries, keys) -> (B, keys)
        self_weight = row.new_zeros(row.shape[0], 1)
        if row.shape[1] == tokens + 1:  # class attention: the query's own token comes first
            self_weight, row = row[:, :1], row[:, 1:]
        elif row.shape[1] == tokens - prefix:
            row = F.pad(row, (prefix, 0))
        pieces.append((self_weight, row))
    return pieces


def _pool_row(trace: Trace, method: Method) -> Float[Tensor, "b n"]:
    """What the pooling reads of each token, in one row."""
    return torch.stack([row for _, row in _pool_attentions(trace, method)]).sum(0)


def _pool_rollout(trace: Trace, method: Method, product: Tensor) -> Float[Tensor, "b n"]:
    """The pooling as one more layer of the rollout: the query starts at zero and takes from the tokens."""
    keep, add = method.base.pool_residual
    query = torch.zeros_like(product[:, 0])
    for self_weight, row in _pool_attentions(trace, method):
        taken = self_weight * query + torch.einsum("bi,bij->bj", row, product)
        query = keep * query + add * taken
    return query
