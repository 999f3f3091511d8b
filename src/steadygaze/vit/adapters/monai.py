"""Adapter for MONAI's ViT on images (spatial_dims=2).

With `classification=True` the head is its classifier; without, the mean of the normalized patches, of which
its forward pass returns all. Its attention multiplies with einsum, which is answered by matmul, so that what
records attention and applies rules sees both products.
"""

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.vit.intercept import Interception, TorchFunction
from steadygaze.vit.parts import linear, linear_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Parts, Plan

PRODUCTS = {"blxd,blyd->blxy": True, "bhxy,bhyd->bhxd": False}  # q·kᵀ and A·v; whether to transpose


class _Matmul(Interception):
    """Attention's einsum as matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.intercept("einsum", torch.einsum)

    def einsum(self, func: TorchFunction, equation: Any, *operands: Any) -> Tensor:
        if equation not in PRODUCTS:
            return func(equation, *operands)
        a, b = operands
        return a @ (b.transpose(-2, -1) if PRODUCTS[equation] else b)


def matches(model: nn.Module) -> bool:
    """Whether a model is MONAI's ViT."""
    return (type(model).__module__, type(model).__name__) == ("monai.networks.nets.vit", "ViT")


@register_adapter("monai", matches=matches)
def plan(model: Any) -> Plan:
    """The view of MONAI's ViT."""
    rows, columns, channels = _patch(model.patch_embedding.patch_embeddings)
    patches = model.patch_embedding.position_embeddings.shape[1]
    side = isqrt(patches)
    if side**2 != patches:
        raise UnsupportedModelError(f"MONAI ViT: expected a square grid of patches, got {patches} patches")
    classifies = hasattr(model, "classification_head")

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        x = model.patch_embedding(images)
        if classifies:
            x = torch.cat([model.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x, None, (images.shape[-2] // rows, images.shape[-1] // columns)

    def head(x: Tensor) -> Tensor:
        x = model.norm(x)
        return model.classification_head(x[:, 0]) if classifies else x.mean(dim=1)

    def call(block: nn.Module, x: Tensor) -> Tensor:
        with _Matmul():
            return block(x)

    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": lambda x, layout, b=b: call(b, x), "parts": _parts(b)} for b in model.blocks
        ],
        head=lambda x, layout: head(x),
        input_size=(channels, side * rows, side * columns),
        fixed_size=True,
        grid=(side, side),
        prefix=int(classifies),
        readout="class" if classifies else "mean",
        readout_rows=(0,) if classifies else (),
        kind="MONAI ViT",
        outputs="classes" if classifies else "features",
    )


def _patch(embedding: Any) -> tuple[int, int, int]:
    """Rows, columns and channels of a patch: of a convolution, or of einops and a linear map."""
    if isinstance(embedding, nn.Conv2d):
        rows, columns = embedding.kernel_size
        return rows, columns, embedding.in_channels
    lengths = {} if isinstance(embedding, nn.Conv3d) else embedding[0].axes_lengths
    if "p1" not in lengths or "p3" in lengths:
        raise UnsupportedModelError(
            "MONAI ViT: expected a model of images (spatial_dims=2), got one of volumes"
        )
    rows, columns = lengths["p1"], lengths["p2"]
    return rows, columns, embedding[1].in_features // (rows * columns)


def _parts(block: Any) -> Callable[[], Parts] | None:
    """Linear parts of a pre-norm block."""
    attention = block.attn
    if not isinstance(attention.out_proj, nn.Linear):
        return None

    def parts() -> Parts:
        together = isinstance(attention.qkv, nn.Linear)
        weight, bias = linear(attention.qkv if together else attention.to_v)
        width = attention.out_proj.in_features
        return linear_parts(
            norm1=block.norm1,
            value=(weight[-width:], None if bias is None else bias[-width:]),
            output=linear(attention.out_proj),
            norm2=block.norm2,
        )

    return parts
