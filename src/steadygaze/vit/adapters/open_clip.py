"""Adapter for open_clip: its VisionTransformer, towers of timm, and whole models, seen as their image tower.

The head gives the image embedding, not yet of unit length.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.vit.outputs import compares_text
from steadygaze.vit.parts import linear_parts
from steadygaze.vit.registry import find_plan, register_adapter
from steadygaze.vit.view import Layout, Parts, Plan

TOWERS = ("VisionTransformer", "TimmModel")


def matches(model: nn.Module) -> bool:
    """Whether a model is of open_clip, whole or its image tower."""
    return type(model).__module__.startswith("open_clip.") and (
        compares_text(model) or type(model).__name__ in TOWERS
    )


@register_adapter("open_clip", matches=matches)
def plan(model: Any) -> Plan | None:
    """The view of the image tower."""
    tower = getattr(model, "visual", model)
    name = type(tower).__name__
    if name == "VisionTransformer":
        return _vision_transformer(tower)
    inner = find_plan(tower.trunk) if name == "TimmModel" else None
    if inner is None:
        raise UnsupportedModelError(f"open_clip {type(model).__name__}: its image tower {name} is not a ViT")
    trunk = inner

    def head(x: Tensor, layout: Layout) -> Tensor:
        return tower.head(trunk.head(x, layout))

    return replace(trunk, head=head, outputs="features", kind=f"open_clip {trunk.kind}")


def _vision_transformer(tower: Any) -> Plan:
    if tower.attn_pool is not None or tower.pool_type not in ("tok", "avg"):
        raise UnsupportedModelError(
            "open_clip VisionTransformer: expected a head on the class token or on the mean of the patches, "
            "got attention pooling with several queries (CoCa) or no pooling"
        )
    stack, norm_pre = tower.transformer, tower.ln_pre
    patch = tower.patch_size

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        x = tower.conv1(images)
        grid = (x.shape[-2], x.shape[-1])
        x = x.flatten(2).transpose(1, 2)
        token = tower.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1)
        return torch.cat([token, x], dim=1) + tower.positional_embedding.to(x.dtype), None, grid

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        x = norm_pre(x) if index == 0 else x
        block = stack.resblocks[index]
        return block(x) if stack.batch_first else block(x.transpose(0, 1)).transpose(0, 1)

    def head(x: Tensor, layout: Layout) -> Tensor:
        pooled = tower._pool(x)[0]
        return pooled if tower.proj is None else pooled @ tower.proj

    before = None if isinstance(norm_pre, nn.Identity) else norm_pre
    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": partial(call, i), "parts": block_parts(b, None if i else before)}
            for i, b in enumerate(stack.resblocks)
        ],
        head=head,
        input_size=(tower.conv1.in_channels, *tower.image_size),
        fixed_size=True,
        grid=(tower.image_size[0] // patch[0], tower.image_size[1] // patch[1]),
        prefix=1,
        readout="class" if tower.pool_type == "tok" else "mean",
        readout_rows=(0,) if tower.pool_type == "tok" else (),
        kind="open_clip VisionTransformer",
        outputs="features",
    )


def block_parts(block: Any, before: nn.Module | None) -> Callable[[], Parts] | None:
    """Linear parts of a CLIP block with torch's own attention; None for open_clip's custom blocks."""
    attention = getattr(block, "attn", None)
    if type(block).__name__ != "ResidualAttentionBlock" or not isinstance(attention, nn.MultiheadAttention):
        return None

    def parts() -> Parts:
        weight, bias = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias
        return linear_parts(
            norm1=block.ln_1,
            value=(weight, None if bias is None else bias.chunk(3)[2]),
            output=(attention.out_proj.weight, attention.out_proj.bias),
            norm2=block.ln_2,
            scale1=getattr(getattr(block, "ls_1", None), "gamma", None),
            scale2=getattr(getattr(block, "ls_2", None), "gamma", None),
            before=before,
        )

    return parts
