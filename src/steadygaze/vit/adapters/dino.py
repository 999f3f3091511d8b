"""Adapter for the classes that torch.hub gives for DINO (facebookresearch/dino) and DINOv2.

Both embed in one method, whose name differs; DINOv2's blocks may lie in chunks. The head is what their
forward pass gives: the normalized class token, through a linear classifier where one was attached.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from steadygaze.vit.parts import linear, linear_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Parts, Plan

DINO = ("vision_transformer", "VisionTransformer")  # module path and class of torch.hub's repository
DINOV2 = ("dinov2.models.vision_transformer", "DinoVisionTransformer")


def matches(model: nn.Module) -> bool:
    """Whether a model is of the class of DINO or of DINOv2."""
    return (type(model).__module__, type(model).__name__) in (DINO, DINOV2)


@register_adapter("dino", matches=matches)
def plan(model: Any) -> Plan:
    """The view of DINO's and DINOv2's own backbones."""
    second = type(model).__name__ == DINOV2[1]
    prepare = model.prepare_tokens_with_masks if second else model.prepare_tokens
    head = model.head if second else nn.Identity()  # DINO's forward pass leaves its head out
    side = model.patch_embed.patch_size
    rows, columns = side if isinstance(side, tuple) else (side, side)
    size = model.patch_embed.img_size
    height, width = size if isinstance(size, tuple) else (size, size)

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        return prepare(images), None, (images.shape[-2] // rows, images.shape[-1] // columns)

    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": lambda x, layout, b=b: b(x), "parts": _parts(b)} for b in _blocks(model)
        ],
        head=lambda x, layout: head(model.norm(x)[:, 0]),
        input_size=(model.patch_embed.proj.in_channels, height, width),
        fixed_size=False,  # positions are interpolated
        grid=(height // rows, width // columns),
        prefix=1 + (getattr(model, "num_register_tokens", 0) or 0),
        readout="class",
        kind="DINOv2 backbone" if second else "DINO backbone",
        outputs="features" if isinstance(head, nn.Identity) else "classes",
    )


def _blocks(model: Any) -> list[nn.Module]:
    """The blocks; a chunk of them has identities in place of the blocks of chunks before it."""
    if not getattr(model, "chunked_blocks", False):
        return list(model.blocks)
    return [block for chunk in model.blocks for block in chunk if not isinstance(block, nn.Identity)]


def _parts(block: Any) -> Callable[[], Parts]:
    """Linear parts of a pre-norm block."""

    def parts() -> Parts:
        (weight, bias), width = linear(block.attn.qkv), block.attn.proj.in_features
        return linear_parts(
            norm1=block.norm1,
            value=(weight[-width:], None if bias is None else bias[-width:]),
            output=linear(block.attn.proj),
            norm2=block.norm2,
            scale1=getattr(getattr(block, "ls1", None), "gamma", None),
            scale2=getattr(getattr(block, "ls2", None), "gamma", None),
        )

    return parts
