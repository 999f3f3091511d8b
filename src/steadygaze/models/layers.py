"""What the architectures of this package share: attention, token and map layouts, the interface of timm.

`small_vit` is a ViT for synthetic tasks, with a class token and a learned position embedding.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import trunc_normal_
from torch import Tensor, nn

from steadygaze.data.preprocess import IMAGENET_MEAN, IMAGENET_STD

Grid = tuple[int, int]


def cfg(first_conv: str, **changes: Any) -> dict[str, Any]:
    """timm's configuration of a model for 224 pixels and 1000 classes without pretrained weights."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "first_conv": first_conv,
        "classifier": "head",
        **changes,
    }


def to_map(x: Float[Tensor, "b n c"], grid: Grid) -> Float[Tensor, "b c h w"]:
    """Tokens in raster order as a feature map."""
    return x.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n c"]:
    """A feature map as tokens in raster order.

    Not by `flatten(2).transpose(1, 2)`: with its strides, torch 2.15 computes wrong gradients of an
    eval-mode batch norm at batch size 1.
    """
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def split_heads(x: Float[Tensor, "b n c"], heads: int) -> Float[Tensor, "b h n d"]:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Float[Tensor, "b n c"]:
    """softmax(q·kᵀ / √d)·v of (B, N, C) queries, keys and values, heads concatenated."""
    q, k, v = (split_heads(t, heads) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def init_linear(module: nn.Module) -> None:
    """Linear layers: weights from a truncated normal distribution (std 0.02), biases zero."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Classifier(nn.Module):
    """The interface of a timm model: `forward_features`, `forward_head` and a replaceable classifier."""

    num_classes: int
    num_features: int
    head: nn.Module

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Float[Tensor, "b n d"], pre_logits: bool = False) -> Tensor:
        return x[:, 0] if pre_logits else self.head(x[:, 0])  # of the class token

    def forward(self, x: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes"]:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()


def small_vit(
    size: int,
    patch: int,
    classes: int,
    *,
    width: int = 64,
    depth: int = 3,
    heads: int = 4,
    seed: int = 0,
    pool: Literal["token", "avg"] = "token",
) -> nn.Module:
    """An untrained timm VisionTransformer for square images; its weights depend on `seed` alone."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VisionTransformer(
            img_size=size,
            patch_size=patch,
            num_classes=classes,
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            mlp_ratio=2,
            global_pool=pool,
        )
