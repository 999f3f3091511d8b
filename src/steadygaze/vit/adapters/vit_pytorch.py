"""Adapter for the ViT of vit-pytorch (lucidrains): a layer is a pair of attention and feed-forward.

Versions differ in the shapes of class token and positions, and in whether a norm follows the layers.
"""

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.vit.parts import linear, linear_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Parts, Plan, Readout


def matches(model: nn.Module) -> bool:
    """Whether a model is the ViT of vit-pytorch."""
    return (type(model).__module__, type(model).__name__) == ("vit_pytorch.vit", "ViT")


@register_adapter("vit_pytorch", matches=matches)
def plan(model: Any) -> Plan:
    """The view of vit-pytorch's ViT."""
    width = model.pos_embedding.shape[-1]
    tokens = model.cls_token.reshape(-1, width)  # none if the patches are averaged
    positions = model.pos_embedding.reshape(-1, width)
    side = isqrt(len(positions) - len(tokens))
    if side**2 != len(positions) - len(tokens):
        raise UnsupportedModelError(
            f"vit-pytorch ViT: expected a square grid of patches, got {len(positions) - len(tokens)} patches"
        )
    lengths = model.to_patch_embedding[0].axes_lengths  # of einops: the sides of a patch
    rows, columns = lengths["p1"], lengths["p2"]
    first = next(m for m in model.to_patch_embedding if isinstance(m, nn.Linear))
    norm = getattr(model.transformer, "norm", nn.Identity())
    averaged = model.pool == "mean"
    readout: Readout = "mean" if averaged else "class"

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        x = model.to_patch_embedding(images)
        x = torch.cat([tokens.expand(x.shape[0], -1, -1), x], dim=1) + positions
        return model.dropout(x), None, (images.shape[-2] // rows, images.shape[-1] // columns)

    def head(x: Tensor) -> Tensor:
        x = norm(x)
        x = x.mean(dim=1) if averaged else x[:, 0]
        return x if model.mlp_head is None else model.mlp_head(model.to_latent(x))

    def call(pair: Any, x: Tensor) -> Tensor:
        attend, feed = pair
        x = attend(x) + x
        return feed(x) + x

    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": lambda x, layout, b=b: call(b, x), "parts": _parts(*b)}
            for b in model.transformer.layers
        ],
        head=lambda x, layout: head(x),
        input_size=(first.in_features // (rows * columns), side * rows, side * columns),
        fixed_size=True,
        grid=(side, side),
        prefix=len(tokens),
        readout=readout,
        readout_rows=tuple(range(len(tokens))) if averaged else (0,),
        kind="vit-pytorch ViT",
        outputs="features" if model.mlp_head is None else "classes",
    )


def _parts(attend: Any, feed: Any) -> Callable[[], Parts] | None:
    """Linear parts of a layer whose norms are inside attention and feed-forward."""
    output = getattr(attend, "to_out", None)
    norms: tuple[Any, Any] = getattr(attend, "norm", None), getattr(feed, "net", [None])[0]
    if not isinstance(output, nn.Sequential) or not all(isinstance(norm, nn.LayerNorm) for norm in norms):
        return None

    def parts() -> Parts:
        weight, bias = linear(attend.to_qkv)
        return linear_parts(
            norm1=norms[0],
            value=(weight.chunk(3)[2], None if bias is None else bias.chunk(3)[2]),
            output=linear(output[0]),
            norm2=norms[1],
        )

    return parts
