"""Hierarchical models of any library: all blocks in order, each on its own grid.

x^l is exactly what block l is given, as tokens (B, N, C). What lies between two stages (merging, pooling,
norm) belongs to the call of the last block before it, so that x^l lies on the grid block l works on. The map
lies on the grid of the last stage. No one attention matrix spans all tokens, and patches cannot be removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.target import Outputs
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import Layout, Plan, Readout

Grid = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """One block: its module, how it is run on tokens that lie on a grid, and the grid of what it gives."""

    module: nn.Module
    run: Callable[[Tensor, Grid], Tensor]
    stride: int = 1
    channels_last: bool = False  # the module takes (B, h, w, C)


def hierarchical_plan(
    model: Any,
    embed: Callable[[Tensor], tuple[Tensor, Grid]],
    layers: list[Layer],
    head: Callable[[Tensor, Grid], Tensor],
    size: tuple[int, int],
    *,
    channels: int,
    kind: str,
    outputs: Outputs = "classes",
    prefix: int = 0,
    prefixes: Sequence[int] = (),
    readout: Readout = "mean",
    rows: tuple[int, ...] = (),
    fixed: bool = True,
    spatial: Callable[[int, Tensor], Tensor] | None = None,
) -> Plan:
    """A plan whose `layout.state` holds the grid at the input of every layer, and behind the last one.

    Args:
        channels: Number of channels of the images.
        prefix: Number of tokens before the patches that the head is given.
        prefixes: The same for the input of every layer, where they differ.
    """

    def grids(first: Grid) -> tuple[Grid, ...]:
        sizes = [first]
        for layer in layers:
            height, width = sizes[-1]
            sizes.append((-(-height // layer.stride), -(-width // layer.stride)))
        return tuple(sizes)

    def embedded(images: Tensor) -> tuple[Tensor, tuple[Grid, ...], Grid]:
        x, grid = embed(images)
        state = grids((int(grid[0]), int(grid[1])))
        return x, state, state[-1]

    def feature_map(index: int, x: Tensor, layout: Layout) -> Tensor:
        if spatial is not None:
            return spatial(index, x)
        before = prefixes[index] if index < len(prefixes) else prefix
        return x[:, before:].unflatten(1, layout.state[index])

    blocks = [
        {
            "module": layer.module,
            "call": lambda x, layout, i=i, run=layer.run: run(x, layout.state[i]),
            "spatial": lambda x, layout, i=i: feature_map(i, x, layout),
            "channels_last": layer.channels_last,
        }
        for i, layer in enumerate(layers)
    ]
    parameter = next(model.parameters())
    with torch.no_grad(), evaluation_mode(model):
        _, last = embed(torch.zeros(1, channels, *size, device=parameter.device, dtype=parameter.dtype))
    return Plan(
        embed=embedded,
        blocks=blocks,
        head=lambda x, layout: head(x, layout.state[-1]),
        input_size=(channels, *size),
        fixed_size=fixed,
        grid=grids((int(last[0]), int(last[1])))[-1],
        prefix=prefix,
        readout=readout,
        readout_rows=rows,
        kind=kind,
        removable=False,
        global_attention=False,
        spatial=lambda x, layout: feature_map(len(layers), x, layout),
        outputs=outputs,
    )
