"""Adapter for OpenAI's package `clip`: the whole model, seen as its image tower, and the tower alone.

The head gives the image embedding, not yet of unit length.
"""

from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.vit.adapters.open_clip import block_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Plan


def matches(model: nn.Module) -> bool:
    """Whether a model is of OpenAI's `clip`, whole or its image tower."""
    return type(model).__module__ == "clip.model" and type(model).__name__ in ("CLIP", "VisionTransformer")


@register_adapter("clip", matches=matches)
def plan(model: Any) -> Plan:
    """The view of the image tower of OpenAI's CLIP."""
    tower = getattr(model, "visual", model)
    if type(tower).__name__ != "VisionTransformer":
        raise UnsupportedModelError(f"OpenAI's CLIP: its image tower {type(tower).__name__} is not a ViT")
    (side, _), size = tower.conv1.kernel_size, tower.input_resolution
    blocks = list(tower.transformer.resblocks)

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        x = tower.conv1(images.to(tower.conv1.weight.dtype))
        grid = (x.shape[-2], x.shape[-1])
        x = x.flatten(2).transpose(1, 2)
        token = tower.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1)
        return torch.cat([token, x], dim=1) + tower.positional_embedding.to(x.dtype), None, grid

    def call(block: Any, x: Tensor) -> Tensor:
        # as the block's own forward, but (batch, tokens, width) except in attention: biases belong to tokens
        x = tower.ln_pre(x) if block is blocks[0] else x
        x = x + block.attention(block.ln_1(x).transpose(0, 1)).transpose(0, 1)
        return x + block.mlp(block.ln_2(x))

    def head(x: Tensor) -> Tensor:
        x = tower.ln_post(x[:, 0])
        return x if tower.proj is None else x @ tower.proj

    return Plan(
        embed=embed,
        blocks=[
            {
                "module": b,
                "call": lambda x, layout, b=b: call(b, x),
                "parts": block_parts(b, tower.ln_pre if b is blocks[0] else None),
            }
            for b in blocks
        ],
        head=lambda x, layout: head(x),
        input_size=(tower.conv1.in_channels, size, size),
        fixed_size=True,
        grid=(size // side, size // side),
        prefix=1,
        readout="class",
        kind="OpenAI CLIP VisionTransformer",
        outputs="features",
    )
