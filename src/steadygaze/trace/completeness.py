"""Input x gradient taken apart: what no patch gets, and how much comes from content and from position.

    Σ_j ⟨x_j, g_j⟩ over all tokens and biases = Σ map + u            u: prefix tokens, biases behind them
    ⟨x⁰_j, g_j⟩ = ⟨c_j, g_j⟩ + ⟨e_j, g_j⟩,   x⁰_j = c_j + e_j         c: embedded patch, e: position embedding

The score T is not a step of the network: its own offset T − ⟨y, ∂T/∂y⟩ is part of u, and zero for a logit.

Formulas: docs/equations.md#completeness, docs/equations.md#content-position.

`resize_map` brings the maps of a hierarchical model's stages to one grid (docs/equations.md#resize-maps).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.trace.capture import Trace
from steadygaze.vit.intercept import ACTIVATIONS, LAYER_NORM, RMS_NORM, Interception, TorchFunction
from steadygaze.vit.view import ViT


def resize_map(image: Float[Tensor, "b h w"], grid: tuple[int, int]) -> Float[Tensor, "b gh gw"]:
    """Resize a map to `grid` by bilinear interpolation, keeping its sum."""
    if tuple(image.shape[-2:]) == tuple(grid):
        return image
    wide = image.float() if image.dtype.itemsize < 4 else image  # CPUs do not resize in half precision
    small = F.interpolate(wide[:, None], size=grid, mode="bilinear", align_corners=False, antialias=True)
    small = small[:, 0] * (image.shape[-2] * image.shape[-1] / (grid[0] * grid[1]))
    lost = wide.sum((-2, -1), keepdim=True) - small.sum((-2, -1), keepdim=True)
    return (small + lost / (grid[0] * grid[1])).to(image.dtype)


@dataclass(frozen=True)
class Shares:
    """A map with what it does not show; `Attribution` documents the fields."""

    scores: Float[Tensor, "b h w"]
    unattributed: Float[Tensor, " b"] | None = None
    parts: dict[str, Float[Tensor, "b h w"]] | None = None


def accounted(trace: Trace, layers: range, *, biases: bool, implicit: bool = False) -> Float[Tensor, " b"]:
    """Σ over `layers` and all tokens of ⟨x^l, g^l⟩, every bias term from the first layer on, and T's offset.

    Args:
        biases: Whether bias terms count; the trace must have recorded them.
    """
    assert trace.quantity is not None, "a gradient was taken"
    y = trace.logits.detach()
    total = trace.quantity - (y * trace.grad(trace.run.logits)).sum(1)
    for layer in layers:
        x, g = trace.tokens(layer)
        total = total + (x * g).flatten(1).sum(1)
    if biases:
        for layer in range(layers[0], trace.depth + 1):
            total = total + trace.bias_terms(layer, implicit=implicit).sum(1)
            total = total + trace.bias_rest(layer, implicit=implicit).sum(1)
    return total


class _WithoutContent(Interception):
    """An embedding whose patches are zero: what is left of a token is its position.

    Attributes:
        calls: Number of maps that made patches of pixels.
        nonlinear: Whether another kind of map was met.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.nonlinear = 0, False
        self.intercept("project", F.conv2d, F.conv3d, F.linear)
        self.intercept("other", *LAYER_NORM, *RMS_NORM, *ACTIVATIONS, F.batch_norm, F.group_norm)

    def project(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.zeros_like(func(*args, **kwargs))

    def other(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        self.nonlinear = True
        return func(*args, **kwargs)


def position_tokens(vit: ViT, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "1 n d"] | None:
    """e: the tokens without the content of their patches; None where the embedding is not patch + position.

    A convolutional stem, or a norm over the embedded patches, does not separate the two.
    """
    if not vit.plan.global_attention or vit.plan.mixed:
        return None
    with torch.no_grad(), _WithoutContent() as mode:
        tokens = vit.embed(images[:1])
    return None if mode.nonlinear or mode.calls != 1 else tokens


def content_and_position(
    trace: Trace, position: Float[Tensor, "1 n d"], scores: Float[Tensor, "b h w"]
) -> dict[str, Float[Tensor, "b h w"]]:
    """The two parts of the map ⟨x⁰, g⟩; their sum is the map."""
    block = trace.vit.blocks[0]
    g = block.patches(trace.tokens(0)[1], trace.run.layout)
    e = block.patches(position.expand(len(scores), -1, -1), trace.run.layout)
    part = resize_map((e * g).sum(-1), trace.run.layout.grid)
    return {"content": (scores - part).detach(), "position": part.detach()}
