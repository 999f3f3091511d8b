"""Adapter for torchvision's VisionTransformer (vit_b_16 and its kin)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.models.vision_transformer import VisionTransformer

from steadygaze.vit.adapter_registry import register_built_in
from steadygaze.vit.parts import linear_parts
from steadygaze.vit.view import Parts, Plan


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


register_built_in("torchvision", matches=VisionTransformer, plan=plan)
