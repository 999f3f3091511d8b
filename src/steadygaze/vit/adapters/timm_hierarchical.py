"""Adapter for timm's hierarchical models: Swin, Swin V2 (and CR), PVT v2, PiT, MViT v2, Hiera, Twins, XCiT.

See `hierarchical`. MViT and Hiera pool inside the first block of a stage, whose input still lies on the grid
before.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.models.hiera import Hiera
from timm.models.levit import Levit
from timm.models.mvitv2 import MultiScaleVit
from timm.models.pit import PoolingVisionTransformer
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.twins import Twins
from timm.models.xcit import Xcit
from torch import Tensor, nn

from steadygaze.target import Outputs
from steadygaze.vit.adapters.hierarchical import Grid, Layer, hierarchical_plan
from steadygaze.vit.parts import classifies
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Headless, Plan, Readout


def _timm_plan(model: Any, *parts: Any, **options: Any) -> Plan:
    """`hierarchical_plan` of a timm model."""
    outputs: Outputs = "classes" if classifies(model) else "features"
    kind = f"timm {type(model).__name__}"
    return hierarchical_plan(model, *parts, channels=model.in_chans, kind=kind, outputs=outputs, **options)


def _size(model: Any) -> tuple[int, int]:
    height, width = getattr(model.patch_embed, "img_size", None) or model.pretrained_cfg["input_size"][1:]
    return int(height), int(width)


def _swin(model: Any) -> Plan:
    """Swin and Swin V2: blocks on (B, h, w, C), stages begin with patch merging; CR ends on (B, C, h, w)."""
    stages = list(model.stages if isinstance(model, SwinTransformerV2Cr) else model.layers)
    channels_first = isinstance(model, SwinTransformerV2Cr)

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x = model.patch_embed(images)
        x = stages[0].downsample(x.permute(0, 2, 3, 1) if channels_first else x)
        return x.flatten(1, 2), x.shape[1:3]

    def run(block: nn.Module, merge: nn.Module | None, x: Tensor, grid: Grid) -> Tensor:
        x = block(x.unflatten(1, grid))
        return (x if merge is None else merge(x)).flatten(1, 2)

    layers = []
    for s, stage in enumerate(stages):
        for block in stage.blocks:
            last = block is stage.blocks[-1] and s + 1 < len(stages)
            merge = stages[s + 1].downsample if last else None
            stride = 1 if merge is None or isinstance(merge, nn.Identity) else 2
            layers.append(Layer(block, partial(run, block, merge), stride, channels_last=True))

    def head(x: Tensor, grid: Grid) -> Tensor:
        if channels_first:
            return model.forward_head(x.unflatten(1, grid).permute(0, 3, 1, 2))
        return model.forward_head(model.norm(x).unflatten(1, grid))

    return _timm_plan(model, embed, layers, head, _size(model))


def _pvt(model: Any) -> Plan:
    """PVT v2: blocks take the grid, a norm ends each stage, then an overlapping patch embedding follows."""
    stages = list(model.stages)

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x = model.patch_embed(images)
        return x.flatten(1, 2), x.shape[1:3]

    def close(stage: Any, x: Tensor, grid: Grid) -> Tensor:
        return stage.norm(x).unflatten(1, grid).permute(0, 3, 1, 2).contiguous()

    def run(block: nn.Module, stage: Any, following: Any, x: Tensor, grid: Grid) -> Tensor:
        x = block(x, grid)
        return x if following is None else following.downsample(close(stage, x, grid)).flatten(1, 2)

    layers = []
    for s, stage in enumerate(stages):
        for block in stage.blocks:
            last = block is stage.blocks[-1] and s + 1 < len(stages)
            after = stages[s + 1] if last else None
            layers.append(Layer(block, partial(run, block, stage, after), 2 if last else 1))
    return _timm_plan(
        model,
        embed,
        layers,
        lambda x, grid: model.forward_head(close(stages[-1], x, grid)),
        _size(model),
        fixed=False,
    )


def _pit(model: Any) -> Plan:
    """PiT: between stages a convolution pools the patches, and a linear map the class tokens."""
    stages, prefix = list(model.transformers), model.num_tokens

    def begin(stage: Any, x: Tensor, tokens: Tensor) -> Tensor:
        if stage.pool is not None:
            x, tokens = stage.pool(x, tokens)
        return stage.norm(torch.cat((tokens, x.flatten(2).transpose(1, 2)), dim=1))

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x = model.pos_drop(model.patch_embed(images) + model.pos_embed)
        return begin(stages[0], x, model.cls_token.expand(x.shape[0], -1, -1)), x.shape[-2:]

    def run(block: nn.Module, following: Any, x: Tensor, grid: Grid) -> Tensor:
        x = block(x)
        if following is None:
            return x
        return begin(following, x[:, prefix:].transpose(1, 2).unflatten(2, grid), x[:, :prefix])

    layers = []
    for s, stage in enumerate(stages):
        for block in stage.blocks:
            last = block is stage.blocks[-1] and s + 1 < len(stages)
            after = stages[s + 1] if last else None
            layers.append(Layer(block, partial(run, block, after), 2 if last else 1))
    return _timm_plan(
        model,
        embed,
        layers,
        lambda x, grid: model.forward_head(model.norm(x[:, :prefix])),
        _size(model),
        prefix=prefix,
        readout="class",
        rows=tuple(range(prefix)),
    )


def _mvit(model: Any) -> Plan:
    """MViT v2: the first block of a stage pools its queries, so its input lies on the grid before."""
    prefix = model.num_prefix_tokens

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x, grid = model.patch_embed(images)
        if model.cls_token is not None:
            x = torch.cat((model.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return x if model.pos_embed is None else x + model.pos_embed, grid

    blocks = [block for stage in model.stages for block in stage.blocks]
    strides = [1 if b.shortcut_pool_attn is None else b.shortcut_pool_attn.stride[0] for b in blocks]

    def run(block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        return block(x, grid)[0]

    layers = [Layer(b, partial(run, b), stride) for b, stride in zip(blocks, strides, strict=True)]
    table = getattr(
        blocks[0].attn, "rel_pos_h", None
    )  # 2·n − 1 rows for a grid of n: the only trace of the image size
    if table is None:
        height, width = _size(model)
    else:
        height, width = ((len(table) + 1) // 2 * stride for stride in model.patch_embed.proj.stride)
    readout: Readout = "mean" if model.global_pool == "avg" else "class"
    return _timm_plan(
        model,
        embed,
        layers,
        lambda x, grid: model.forward_head(model.norm(x)),
        (height, width),
        prefix=prefix,
        readout=readout,
        rows=(0,) if readout == "class" else (),
    )


def _hiera(model: Any) -> Plan:
    """Hiera: tokens in the order of mask units, so that pooling is a maximum; `spatial` undoes the order."""
    shape = model.tokens_spatial_shape
    stride = model.q_stride[0]
    pools = [end + 1 for end in model.stage_ends[: model.q_pool]]

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        return model.unroll(model._pos_embed(model.patch_embed(images))), (shape[0], shape[1])

    def spatial(index: int, x: Tensor) -> Tensor:
        return model.reroll(x.contiguous(), max(index - 1, 0))

    def run(block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        return block(x)

    layers = [Layer(b, partial(run, b), stride if i in pools else 1) for i, b in enumerate(model.blocks)]
    size = (shape[0] * model.patch_stride[0], shape[1] * model.patch_stride[1])
    return _timm_plan(model, embed, layers, lambda x, grid: model.forward_head(x), size, spatial=spatial)


def _twins(model: Any) -> Plan:
    """Twins: blocks take the grid; a convolution for positions follows the first block of each stage."""

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x, grid = model.patch_embeds[0](images)
        return model.pos_drops[0](x), grid

    def run(block: nn.Module, position: Any, following: int | None, x: Tensor, grid: Grid) -> Tensor:
        x = block(x, grid)
        x = x if position is None else position(x, grid)
        if following is None:
            return x
        x, _ = model.patch_embeds[following](x.unflatten(1, grid).permute(0, 3, 1, 2).contiguous())
        return model.pos_drops[following](x)

    layers = []
    for s, stage in enumerate(model.blocks):
        for j, block in enumerate(stage):
            after = s + 1 if j + 1 == len(stage) and s + 1 < len(model.blocks) else None
            position = model.pos_block[s] if j == 0 else None
            layers.append(Layer(block, partial(run, block, position, after), 1 if after is None else 2))
    height, width = model.patch_embeds[0].img_size
    return _timm_plan(
        model, embed, layers, lambda x, grid: model.forward_head(model.norm(x)), (height, width)
    )


def _levit(model: Any) -> Plan:
    """LeViT: stages begin with attention from a subsampled grid; the variants of convolutions use maps."""
    stages = list(model.stages)

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x = model.stem(images)
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])

    def on_map(x: Tensor, grid: Grid) -> Tensor:
        return x.transpose(1, 2).unflatten(2, grid)

    def run(block: nn.Module, following: nn.Module | None, x: Tensor, grid: Grid) -> Tensor:
        x = block(on_map(x, grid) if model.use_conv else x)
        x = x if following is None else following(x)
        return x.flatten(2).transpose(1, 2) if model.use_conv else x

    def head(x: Tensor, grid: Grid) -> Tensor:
        return model.forward_head(on_map(x, grid) if model.use_conv else x)

    layers = []
    for s, stage in enumerate(stages):
        for block in stage.blocks:
            last = block is stage.blocks[-1] and s + 1 < len(stages)
            after = stages[s + 1].downsample if last else None
            layers.append(Layer(block, partial(run, block, after), 2 if last else 1))
    height, width = stages[0].blocks[0].attn.resolution
    step = model.stem.stride
    return _timm_plan(model, embed, layers, head, (height * step, width * step))


def _xcit(model: Any) -> Plan:
    """XCiT: one grid, attention over channels, convolutions over patches; class attention is the head."""

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x, grid = model.patch_embed(images)
        if model.pos_embed is not None:
            x = x + model.pos_embed(x.shape[0], *grid).reshape(x.shape[0], -1, x.shape[1]).permute(0, 2, 1)
        return model.pos_drop(x), grid

    def head(x: Tensor, grid: Grid) -> Tensor:
        x = torch.cat((model.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        for block in model.cls_attn_blocks:
            x = block(x)
        return model.forward_head(model.norm(x))

    def run(block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        return block(x, *grid)

    layers = [Layer(b, partial(run, b)) for b in model.blocks]
    return _timm_plan(model, embed, layers, head, _size(model), readout="pool")


_VIEWS: dict[type[nn.Module], Callable[[Any], Plan]] = {
    SwinTransformer: _swin,
    SwinTransformerV2: _swin,
    SwinTransformerV2Cr: _swin,
    PyramidVisionTransformerV2: _pvt,
    PoolingVisionTransformer: _pit,
    MultiScaleVit: _mvit,
    Hiera: _hiera,
    Twins: _twins,
    Levit: _levit,
    Xcit: _xcit,
}


@register_adapter("timm_hierarchical", matches=tuple(_VIEWS))
def plan(model: nn.Module) -> Plan:
    """The view of a hierarchical timm model."""
    view = next(view for model_class, view in _VIEWS.items() if isinstance(model, model_class))
    if getattr(model, "global_pool", "avg"):
        return view(model)
    head = Headless(
        f"{type(model).__name__} has global_pool='': no pooled head. Use its default and num_classes > 0."
    )
    return replace(view(model), head=head)
