"""Where rows and columns of a layer's attention lie among its tokens: windows, shifts and reduced keys.

Swin cuts its grid into windows, shifts them, and pads them; Twins and Hiera have windows of their own; PVT
attends to a reduced grid. Nothing is assumed about how: the values v of one image are differentiated with
respect to the block's input, which shows which token each row of v was computed from. A row is written in
binary; for each digit, one backward pass from the rows with a 1 there and one from those with a 0 give that
digit of the row of every token at once. Both must not reach the same token, or it feeds several rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.trace.record import Want
from steadygaze.trace.seam import Seam
from steadygaze.vit.view import Block, Layout, remember

Grid = tuple[int, int]


@dataclass(frozen=True)
class Arrangement:
    """How one layer's attention is brought to (B, heads, tokens, keys), patches in raster order.

    Attributes:
        grid: Rows and columns of the patches.
        keys: Rows and columns of the keys; those of the patches unless they are reduced.
        prefix: Number of tokens before the patches.
        rows: For windows, the row (window x size + place) of every token; None: one matrix of all tokens.
        heads: Axis of the heads in the model's own attention.
        order: The token of every patch, prefix first; None: they are in order already.
    """

    grid: Grid
    keys: Grid
    prefix: int
    rows: Int[Tensor, " n"] | None = None
    heads: int = 1
    order: Int[Tensor, " n"] | None = None

    def dense(self, a: Tensor, batch: int) -> Float[Tensor, "b heads n k"]:
        """The model's own attention as one matrix for each image and head; zero outside of a window."""
        if self.rows is not None:
            a = self._merged(a, batch, self.rows)
        if self.order is not None:
            a = a[:, :, self.order][..., self.order]
        return a

    def _merged(self, a: Tensor, batch: int, rows: Tensor) -> Tensor:
        # (B·windows, heads, s, s), (B, windows, heads, s, s) or (B, heads, windows, s, s)
        a = a.unflatten(0, (batch, -1)) if a.dim() == 4 else a.movedim(self.heads, 2)
        windows, size = a.shape[1], a.shape[-1]
        tokens = len(rows)
        token_of = torch.full((windows * size,), tokens, device=a.device)  # padding: a column that is dropped
        token_of[rows] = torch.arange(tokens, device=a.device)
        window, place = rows // size, rows % size
        values = a[:, window, :, place].permute(1, 2, 0, 3)  # (tokens, B, heads, s) -> (B, heads, tokens, s)
        columns = token_of.view(windows, size)[window].expand_as(values)
        merged = a.new_zeros(*values.shape[:3], tokens + 1).scatter(-1, columns, values)
        return merged[..., :tokens]


def arrange(block: Block, x: Float[Tensor, "b n d"], layout: Layout, name: str) -> Arrangement:
    """The arrangement of a layer whose attention is not one matrix over all tokens in order.

    Args:
        name: What the layer is called in errors.

    Raises:
        MethodUnavailableError: If its attention cannot be mapped back to the tokens.
    """
    tokens = x.shape[1]
    index = torch.arange(tokens, device=x.device)
    raster = block.patches(index.double().view(1, -1, 1), layout)[0, ..., 0].long()
    grid = (raster.shape[0], raster.shape[1])
    prefix = tokens - raster.numel()
    order = torch.cat([index[:prefix], raster.flatten()])
    shuffled = None if bool((order == index).all()) else order
    one = remember(x[:1].detach().clone().requires_grad_(), layout)
    with torch.enable_grad(), Seam(want=Want(value=True)) as seam:
        record = seam.next_record()
        block(one)
    if not record.attention:
        raise MethodUnavailableError(f"{name} has no attention")
    a, v = record.attention[0].a, record.attention[0].v
    queries, keys = a.shape[-2:]
    if a.dim() == 4 and len(a) == 1 and queries == tokens:
        if keys == tokens:
            rows = None if shuffled is None or v is None else _rows(one, v, 1)
            identity = rows is None or bool((rows == index).all())
            if identity:
                return Arrangement(grid, grid, prefix, order=shuffled)
        reduced = next((size for size in (keys - prefix, keys) if _similar(size, grid)), None)
        if reduced is not None and keys < tokens:
            height, width = _similar(reduced, grid) or grid
            return Arrangement(grid, (height, width), prefix, order=None)
    elif queries == keys and v is not None:
        for heads in (1, 2) if a.dim() == 5 else (1,):
            rows = _rows(one, v, heads)
            if rows is not None:
                return Arrangement(grid, grid, prefix, rows, heads, shuffled)
    raise MethodUnavailableError(
        f"{name} attends from {queries} queries to {keys} keys, which are not its {tokens} tokens one by one "
        "(pooled queries, or attention over channels), so it has no map on them. Use another layer."
    )


def _similar(count: int, grid: Grid) -> Grid | None:
    """Rows and columns of `count` keys on a grid of the same shape; None if there are none."""
    height = round((count * grid[0] / grid[1]) ** 0.5) if count > 0 else 0
    for rows in (height, height - 1, height + 1):
        if rows > 0 and count % rows == 0 and rows <= grid[0] and count // rows <= grid[1]:
            return rows, count // rows
    return None


@torch.enable_grad()
def _rows(x: Float[Tensor, "1 n d"], v: Tensor, heads: int) -> Int[Tensor, " n"] | None:
    """The row of v that each token feeds; None if a token feeds several or none."""
    v = v.movedim(heads if v.dim() == 5 else 1, 0)  # (heads, [1,] windows, size, d)
    count = v[0, ..., 0].numel()
    number = torch.arange(count, device=v.device).view(v.shape[1:-1])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(v.shape, generator=generator).to(v)
    rows = torch.zeros(x.shape[1], dtype=torch.long, device=x.device)
    for digit in range(max(1, (count - 1).bit_length())):
        is_set = ((number >> digit) & 1).bool()[..., None]
        one, zero = (
            torch.autograd.grad(v, x, noise * mask, retain_graph=True)[0][0].ne(0).any(-1)
            for mask in (is_set, ~is_set)
        )
        if bool((one == zero).any()):
            return None
        rows += one.long() << digit
    return rows if len(rows.unique()) == len(rows) else None
