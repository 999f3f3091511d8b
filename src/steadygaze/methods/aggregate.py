"""Aggregation of the maps of all layers into one; composes with every method that has a map for each layer.

| aggregator | map                                                                                     |
| first      | the map at layer 0 (what many bare names mean), or at layer `start`                     |
| last       | the map at the last layer, or at layer `start`                                          |
| plus       | Σ_{l ≥ start} map_l, start = 0 (docs/equations.md#plus)                                 |
| skipplus   | the same from start = ⌈L/2⌉ (`cut="ceil"`, the paper) or ⌊L/2⌋ (`cut="floor"`, its code) |
|            | (docs/equations.md#skipplus)                                                            |
| rollout    | product of the layers' matrices in forward order, then the row that feeds the head      |
|            | (docs/equations.md#rollout)                                                             |

Layers of a hierarchical model have different grids: their maps are resized to the grid of the last stage,
keeping their sum (docs/equations.md#resize-maps).
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.methods.registry import MapMethod, MatrixMethod, Method
from steadygaze.trace.capture import Trace
from steadygaze.trace.completeness import Shares, accounted, content_and_position, resize_map


def first_layer(method: Method, depth: int) -> int:
    """The lowest layer whose map is used.

    Examples:
        >>> import steadygaze as sg
        >>> first_layer(sg.method("decompx+skipplus"), depth=12)
        6
    """
    start = method.option("start")
    if start is not None:
        if start >= depth:
            raise InputError(f"{method.name}: start={start}, but the model has layers 0..{depth - 1}")
        return start
    if method.aggregator == "skipplus":
        half = depth // 2 if method.option("cut") == "floor" else -(-depth // 2)
        return min(half, depth - 1)
    return depth - 1 if method.aggregator == "last" else 0


def layers(method: Method, depth: int) -> range:
    """The layers whose maps are added or multiplied.

    Examples:
        >>> import steadygaze as sg
        >>> layers(sg.method("ixg+plus"), depth=12)
        range(0, 12)
    """
    first = first_layer(method, depth)
    return range(first, first + 1) if method.aggregator in ("first", "last") else range(first, depth)


def aggregate(trace: Trace, method: Method) -> Float[Tensor, "b h w"]:
    """The map of `method` from a trace."""
    base = method.base
    own = method.function_options
    span = layers(method, trace.depth)
    if isinstance(base, MatrixMethod):
        row = _matrix_rows(trace, base, method.aggregator, span, own)
        return row[:, trace.vit.prefix :].unflatten(1, trace.run.layout.grid)
    maps = [base.function(trace, l, **own) for l in span]
    maps = [m for m in maps if m is not None]
    if not maps:
        raise InputError(
            f"{method.name}: no map to add from layer {span[0]} on (layers 0..{trace.depth - 1}). "
            "Start at a lower layer."
        )
    total = _resized_sum(maps, trace.run.layout.grid)
    if isinstance(base, MapMethod) and base.added_once is not None:
        total = total + _resized_sum(base.added_once(trace, span[0], **own), trace.run.layout.grid)
    return total


def shares(trace: Trace, method: Method, position: Float[Tensor, "1 n d"] | None) -> Shares:
    """The map of `method`, what no patch gets, and its parts if it is input x gradient at block 0.

    Args:
        position: Position embeddings of the tokens; None if they are not known.
    """
    scores, base = aggregate(trace, method), method.base
    if not isinstance(base, MapMethod) or not method.input_x_gradient:
        return Shares(scores)
    span, biases = layers(method, trace.depth), bool(method.needs.get("bias"))
    total = accounted(trace, span, biases=biases, implicit=bool(method.option("implicit")))
    at_input = span == range(1) and base.added_once is None
    parts = content_and_position(trace, position, scores) if at_input and position is not None else None
    return Shares(scores, total - scores.sum((1, 2)), parts)


def _resized_sum(maps: Sequence[Float[Tensor, "b _h _w"]], grid: tuple[int, int]) -> Float[Tensor, "b gh gw"]:
    return reduce(torch.add, (resize_map(m, grid) for m in maps))


def _matrix_rows(
    trace: Trace, base: MatrixMethod, aggregator: str | None, span: range, own: dict[str, Any]
) -> Float[Tensor, "b n"]:
    """The aggregated row that feeds the head, one value per token."""
    function = base.function
    pooled = trace.vit.readout == "pool" and len(trace.pooling) > 0
    if aggregator == "rollout":
        step = base.rollout_step or _unchanged
        row = _pool_rollout_row(trace, base, own) if pooled else trace.readout_row()
        for l in reversed(span):  # a row times each matrix: N times fewer operations than their product
            row = torch.einsum("bi,bij->bj", row, step(function(trace, l, **own), **own))
        return row
    row = _pool_row(trace, base, own) if pooled else trace.readout_row().expand(trace.logits.shape[0], -1)
    total = row if pooled and aggregator != "first" else torch.zeros_like(row)
    if not (pooled and aggregator == "last"):
        read = base.read_row or _unchanged
        for l in span:
            total = total + read(torch.einsum("bi,bij->bj", row, function(trace, l, **own)), **own)
    return total


def _unchanged(m: Tensor, **own: Any) -> Tensor:
    return m


def _mean_attention(a: Tensor, g: Tensor, **own: Any) -> Tensor:
    return a.mean(1)


def _pool_attentions(trace: Trace, base: MatrixMethod, own: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """(weight of the query itself, row over the tokens) of each attention of the head, fused over heads."""
    fuse = base.fuse_heads or _mean_attention
    pieces = []
    for attention in trace.pooling:
        matrix = fuse(trace.seen(attention), trace.grad(attention.a), **own)
        own_weight = matrix.new_zeros(matrix.shape[0], 1)
        if matrix.shape[2] == _read_by_head(trace) + 1:  # class attention
            own_weight = matrix.mean(1)[:, :1]
        pieces.append((own_weight, align_pooling(trace, matrix)[:, 0]))
    return pieces


def _read_by_head(trace: Trace) -> int:
    """Number of tokens that the head gets: all but those that registers added."""
    return trace.run.hidden[-1].shape[1] - trace.vit.plan.added


def align_pooling(trace: Trace, matrix: Float[Tensor, "b q k"]) -> Float[Tensor, "b 1 n"]:
    """A matrix of the pooling's attention as one row over the tokens: the mean over its queries."""
    added, read = trace.vit.plan.added, _read_by_head(trace)
    kept = trace.vit.prefix - added
    row = matrix.mean(1, keepdim=True)
    if row.shape[2] == read + 1:  # class attention: the query's own token comes first
        row = row[..., 1:]
    elif row.shape[2] == read - kept:  # the patches alone
        row = F.pad(row, (kept, 0))
    if added:
        row = torch.cat([row[..., :kept], row.new_zeros(*row.shape[:2], added), row[..., kept:]], 2)
    return row


def _pool_row(trace: Trace, base: MatrixMethod, own: dict[str, Any]) -> Float[Tensor, "b n"]:
    """How much the pooling reads of each token, summed over its attentions."""
    return torch.stack([row for _, row in _pool_attentions(trace, base, own)]).sum(0)


def _pool_rollout_row(trace: Trace, base: MatrixMethod, own: dict[str, Any]) -> Float[Tensor, "b n"]:
    """The pooling as one more layer of the rollout; its query starts at zero."""
    keep, add = base.pool_residual
    attentions = _pool_attentions(trace, base, own)
    query = torch.zeros_like(attentions[0][1])
    for self_weight, row in attentions:
        query = keep * query + add * (self_weight * query + row)
    return query


def min_max(x: Float[Tensor, "*shape"], dims: tuple[int, ...]) -> Float[Tensor, "*shape"]:
    """Scale to 0..1 over these axes: (x − min) / (max − min); zeros where x is constant."""
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    return (x - low) / (high - low).clamp_min(torch.finfo(x.dtype).tiny)
