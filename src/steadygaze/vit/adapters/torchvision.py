"""Adapter for torchvision: VisionTransformer (vit_b_16, ...) and SwinTransformer (swin_t, swin_v2_t, ...)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from steadygaze.vit.adapters.hierarchical import Grid, Layer, hierarchical_plan
from steadygaze.vit.parts import linear_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Parts, Plan


@register_adapter("torchvision", matches=VisionTransformer)
def plan(model: Any) -> Plan:
    """The view of a torchvision ViT."""
    grid = (model.image_size // model.patch_size,) * 2

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        x = model._process_input(images)
        x = torch.cat((model.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        return model.encoder.dropout(x + model.encoder.pos_embedding), None, grid

    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": lambda x, layout, b=b: b(x), "parts": _parts(b)}
            for b in model.encoder.layers
        ],
        head=lambda x, layout: model.heads(model.encoder.ln(x)[:, 0]),
        input_size=(3, model.image_size, model.image_size),
        fixed_size=True,
        grid=grid,
        prefix=1,
        readout="class",
        kind="torchvision VisionTransformer",
    )


def _parts(block: Any) -> Callable[[], Parts]:
    attention = block.self_attention

    def parts() -> Parts:
        weight, bias = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias
        value = (weight, None if bias is None else bias.chunk(3)[2])
        return linear_parts(
            norm1=block.ln_1,
            value=value,
            output=(attention.out_proj.weight, attention.out_proj.bias),
            norm2=block.ln_2,
        )

    return parts


@register_adapter("torchvision_swin", matches=SwinTransformer)
def swin_plan(model: Any) -> Plan:
    """The view of a torchvision Swin or Swin V2: `features` is embedding, stage, merging, stage, ...

    The model states no image size; the one it is trained for has one window in the last stage.
    """
    embedding, *parts = model.features
    stages, merges = parts[::2], [*parts[1::2], None]

    def embed(images: Tensor) -> tuple[Tensor, Grid]:
        x = embedding(images)
        return x.flatten(1, 2), (x.shape[1], x.shape[2])

    def run(block: nn.Module, merge: nn.Module | None, x: Tensor, grid: Grid) -> Tensor:
        x = block(x.unflatten(1, grid))
        return (x if merge is None else merge(x)).flatten(1, 2)

    layers = []
    for stage, after in zip(stages, merges, strict=True):
        for block in stage:
            merge = after if block is stage[-1] else None
            layers.append(
                Layer(block, partial(run, block, merge), 1 if merge is None else 2, channels_last=True)
            )

    def head(x: Tensor, grid: Grid) -> Tensor:
        return model.head(model.flatten(model.avgpool(model.permute(model.norm(x).unflatten(1, grid)))))

    window, patch = stages[0][0].attn.window_size, embedding[0].stride
    height, width = (w * p * 2 ** (len(stages) - 1) for w, p in zip(window, patch, strict=True))
    return hierarchical_plan(
        model,
        embed,
        layers,
        head,
        (height, width),
        channels=embedding[0].in_channels,
        kind="torchvision SwinTransformer",
        fixed=False,
    )
