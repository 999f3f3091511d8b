"""Tiny timm VisionTransformers in float64 with random biases, norm gains, LayerScale and class token."""

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

KINDS: dict[str, dict[str, Any]] = {
    "class": {},
    "registers": {"reg_tokens": 2, "init_values": 0.5, "qk_norm": True, "no_embed_class": True},
    "average": {"class_token": False, "global_pool": "avg"},
    "average_with_class": {"global_pool": "avg", "fc_norm": False, "init_values": 0.5},
    "pre_norm": {"pre_norm": True, "qkv_bias": False, "img_size": 9},
}
DEFAULT_KINDS = ("registers", "average")  # of the default tier: tokens before the patches, and none at all


def tiny(kind: str = "class", seed: int = 0, **changes: Any) -> VisionTransformer:
    """d 24, 3 blocks, 2 heads, 4x4 patches of 3 pixels (3x3 for "pre_norm"), 5 classes, eval mode."""
    settings: dict[str, Any] = {
        "img_size": 12,
        "patch_size": 3,
        "embed_dim": 24,
        "depth": 3,
        "num_heads": 2,
        "mlp_ratio": 2,
        "num_classes": 5,
    }
    model = VisionTransformer(**{**settings, **KINDS[kind], **changes}).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("gamma"):
                parameter.copy_(0.7 + 0.2 * noise)
            elif parameter.dim() > 1 and name.endswith("weight"):
                parameter.copy_(noise * 1.3 / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.3 * noise)
    return model


def random_images(model: VisionTransformer, batch: int = 2, seed: int = 1) -> Tensor:
    """(B,3,H,W), standard normal."""
    height, width = model.patch_embed.img_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64)
