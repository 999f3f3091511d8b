"""A small ViT for synthetic tasks, with a class token and a learned position embedding."""

import torch
from torch import nn


def small_vit(
    size: int, patch: int, classes: int, *, width: int = 64, depth: int = 3, heads: int = 4, seed: int = 0
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
        )
