"""Adapter for `steadygaze.models`: RVT, FAN, PVT v1, LocalViT. All but RVT-B mix patches by convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from steadygaze.models import FAN, PVT, RVT, LocalViT
from steadygaze.models.layers import to_map, to_tokens
from steadygaze.vit.adapters.hierarchical import Grid, Layer, hierarchical_plan
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan, Readout


def _plain(
    model: Any,
    embed: Callable[[Tensor], tuple[Tensor, Grid]],
    blocks: Any,
    head: Callable[[Tensor], Tensor],
    grid: Grid,
    *,
    prefix: int,
    readout: Readout,
    rows: tuple[int, ...],
    fixed: bool,
    mixed: bool = True,
    removable: bool = False,
) -> Plan:
    """A model with one grid from first to last block; every block takes it as an argument."""

    def embedded(images: Tensor) -> tuple[Tensor, None, Grid]:
        x, image_grid = embed(images)
        return x, None, image_grid

    def call(block: nn.Module, x: Tensor, layout: Layout) -> Tensor:
        return block(x, layout.grid)

    return Plan(
        embed=embedded,
        blocks=[{"module": b, "call": partial(call, b)} for b in blocks],
        head=lambda x, layout: head(x),
        input_size=(model.in_chans, *model.img_size),
        fixed_size=fixed,
        grid=grid,
        prefix=prefix,
        readout=readout,
        readout_rows=rows,
        removable=removable,
        mixed=mixed,
    )


def _rvt(model: Any) -> Plan:
    """RVT-S and RVT-B keep one grid. Patches can be removed if nothing but attention mixes them (RVT-B)."""

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x = model.patch_embed(images)
        return to_tokens(x), (x.shape[2], x.shape[3])

    if len(model.stages) == 1:
        free = not model.conv_ffn and model.scaled_blocks == 0
        grid = model.patch_embed.grid(*model.img_size)
        return _plain(
            model,
            embed,
            model.stages[0],
            model.forward_head,
            grid,
            prefix=0,
            readout="mean",
            rows=(),
            fixed=model.scaled_blocks > 0,
            mixed=not free,
            removable=free,
        )

    def run(block: nn.Module, shrink: nn.Module | None, x: Tensor, grid: Grid) -> Tensor:
        x = block(x, grid)
        return x if shrink is None else to_tokens(shrink(to_map(x, grid)))

    layers = []
    for s, stage in enumerate(model.stages):
        for block in stage:
            last = block is stage[-1] and s + 1 < len(model.stages)
            layers.append(
                Layer(
                    block, partial(run, block, model.downsamples[s + 1] if last else None), 2 if last else 1
                )
            )
    plan = hierarchical_plan(
        model,
        embed,
        layers,
        lambda x, grid: model.forward_head(x),
        model.img_size,
        channels=model.in_chans,
        kind="",
        fixed=model.scaled_blocks > 0,
    )
    return replace(plan, mixed=True)


def _fan(model: Any) -> Plan:
    """Only patches run through the blocks; the class-attention blocks are the head."""
    grid = (model.img_size[0] // 16, model.img_size[1] // 16)
    return _plain(
        model,
        model.embed,
        model.blocks,
        lambda x: model.forward_head(model.read_out(x)),
        grid,
        prefix=0,
        readout="pool",
        rows=(),
        fixed=False,
    )


def _localvit(model: Any) -> Plan:
    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        return model.embed(images), model.grid

    return _plain(
        model,
        embed,
        model.blocks,
        lambda x: model.forward_head(model.norm(x)),
        model.grid,
        prefix=1,
        readout="class",
        rows=(0,),
        fixed=True,
    )


def _pvt(model: Any) -> Plan:
    """PVT v1: what lies between stages belongs to the block before; only the last stage has a class token."""
    stages = list(model.stages)

    def run(block: nn.Module, following: Any, x: Tensor, grid: Grid) -> Tensor:
        x = block(x, grid)
        return x if following is None else following.embed(to_map(x, grid))[0]

    layers, prefixes = [], []
    for s, stage in enumerate(stages):
        for block in stage.blocks:
            last = block is stage.blocks[-1] and s + 1 < len(stages)
            layers.append(
                Layer(block, partial(run, block, stages[s + 1] if last else None), 2 if last else 1)
            )
            prefixes.append(block.prefix)
    plan = hierarchical_plan(
        model,
        stages[0].embed,
        layers,
        lambda x, grid: model.forward_head(model.norm(x)),
        model.img_size,
        channels=model.in_chans,
        kind="",
        prefix=1,
        prefixes=prefixes,
        readout="class",
        rows=(0,),
        fixed=False,
    )
    return replace(plan, mixed=True)


_VIEWS: dict[type[nn.Module], Callable[[Any], Plan]] = {RVT: _rvt, FAN: _fan, PVT: _pvt, LocalViT: _localvit}


@register_adapter("steadygaze_models", matches=tuple(_VIEWS))
def plan(model: nn.Module) -> Plan:
    """The view of a model of `steadygaze.models`."""
    model_class = next(kind for kind in _VIEWS if isinstance(model, kind))
    return replace(_VIEWS[model_class](model), kind=f"steadygaze {model_class.__name__}")
