"""The hidden states that learnt methods read, with the same tokens in each."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.vit.view import ViT


def hidden_states(vit: ViT, hidden: Sequence[Tensor]) -> list[Float[Tensor, "b t d"]]:
    """x⁰ .. x^L, the blocks' inputs and the last one's output.

    Plain ViTs: all tokens, prefix first. Hierarchical ones: the cells of the map's grid; the output only if
    the last block keeps the grid.
    """
    if vit.plan.global_attention:
        return list(hidden)
    layout = vit.layout(hidden[0])
    pairs = list(zip(vit.blocks, hidden[:-1], strict=True))
    if hidden[-1].shape[1] == hidden[-2].shape[1]:  # the last block keeps the grid
        pairs.append((vit.blocks[-1], hidden[-1]))
    return [on_grid(block.patches(x, layout), layout.grid) for block, x in pairs]


def on_grid(x: Float[Tensor, "b h w d"], grid: tuple[int, int]) -> Float[Tensor, "b t d"]:
    """The mean over each cell of the grid."""
    if tuple(x.shape[1:3]) != tuple(grid):
        x = F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)
    return x.flatten(1, 2)
