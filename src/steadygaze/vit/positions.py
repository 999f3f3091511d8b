"""Position tables for kept patches: from a table over all tokens, their rows (and columns) are gathered.

Relative position biases are made inside a block, for all tokens. `KeptPositions` is active only while kept
tokens run through a block, and only for layouts with removed patches; it answers the two places where such
a table is used: the mask of `scaled_dot_product_attention`, and an addition of shapes that do not fit
(eager attention, pooling with positions).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steadygaze.trace.intercept import ADD, Interception, TorchFunction

if TYPE_CHECKING:
    from steadygaze.vit.view import Layout


class _Gather(Interception):
    def __init__(self, kept: Tensor, patches: int, prefix: int) -> None:
        super().__init__()
        self.kept, self.patches, self.prefix = kept, patches, prefix
        head = torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1)
        self.index = torch.cat([head, kept + prefix], dim=1)  # (B, prefix + k): token indices that are left
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("add", *ADD)

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        mask = None if attn_mask is None else self.pairs(attn_mask, q.shape[-2])
        return func(q, k, v, mask, *args, **kwargs)

    def add(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            x, y = self.fit(x, y), self.fit(y, x)
        return func(x, y, **kwargs)

    def pairs(self, table: Tensor, left: int) -> Tensor:
        """(..., N, N) -> (B, ..., K, K) for the `left` remaining tokens; smaller tables are unchanged."""
        for extra, index in ((self.prefix, self.index), (0, self.kept)):
            if (
                table.shape[-1] == table.shape[-2] == extra + self.patches
                and left == index.shape[1] < table.shape[-1]
            ):
                table = table.expand(
                    index.shape[0], *table.shape[-3:] if table.dim() > 2 else (1, *table.shape)
                )
                rows = index[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[-1])
                columns = index[:, None, None, :].expand(-1, table.shape[1], index.shape[1], -1)
                return table.gather(2, rows).gather(3, columns)
        return table

    def fit(self, table: Tensor, other: Tensor) -> Tensor:
        if table.dim() == 4 and other.dim() == 4 and other.shape[-1] == other.shape[-2]:
            return self.pairs(table, other.shape[-1])
        if table.dim() == 3 and other.dim() == 3 and table.shape[0] == 1 and table.shape[1] > other.shape[1]:
            for extra, index in ((self.prefix, self.index), (0, self.kept)):
                if table.shape[1] == extra + self.patches and other.shape[1] == index.shape[1]:
                    return table[0][index]
        return table


def KeptPositions(layout: Layout, prefix: int) -> AbstractContextManager[Any]:
    """Gather position tables for the kept patches of `layout`; does nothing when all patches are there."""
    if layout.kept is None:
        return nullcontext()
    return _Gather(layout.kept, layout.grid[0] * layout.grid[1], prefix)


def rotary(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Rows (..., P, d) of a rotary embedding for the kept patches: (B, heads or 1, k, d)."""
    if kept is None:
        return rows
    if rows.dim() == 2:
        return rows[kept].unsqueeze(1)
    return rows[:, kept].transpose(0, 1)  # one table for each head: (H, P, d) -> (B, H, k, d)
