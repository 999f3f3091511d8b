"""Tiny models for the tests of losses and of `steadygaze.models`."""

from functools import cache
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from benchmarks import zoo
from steadygaze.training.losses.input_gradient import input_gradient_pass
from steadygaze.training.losses.relevance import relevance_pass


def tiny(noise: float = 0.3, **more) -> VisionTransformer:
    """A ViT of two blocks in float64; noise: standard deviation of what is added to its initial weights."""
    torch.manual_seed(0)
    given = {
        "img_size": 16,
        "patch_size": 4,
        "num_classes": 5,
        "embed_dim": 8,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2.0,
    }
    model = VisionTransformer(**given | more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


SMALL: dict[str, dict[str, Any]] = {
    "rvt_tiny": {"img_size": 64, "depths": (2, 1), "embed_dims": (12, 24), "num_heads": (2, 4)},
    "rvt_tiny_plus": {
        "img_size": (64, 80),
        "depths": (2, 1),
        "embed_dims": (12, 24),
        "num_heads": (2, 4),
        "scaled_blocks": 2,
    },
    "rvt_small": {"img_size": 64, "depths": (2,), "embed_dims": (16,), "num_heads": (2,)},
    "rvt_base_plus": {
        "img_size": 64,
        "depths": (2,),
        "embed_dims": (16,),
        "num_heads": (2,),
        "scaled_blocks": 1,
    },
    "rvt_base": {"img_size": 64, "depths": (2,), "embed_dims": (16,), "num_heads": (2,)},
    "fan_tiny_12_p16_224": {"img_size": (64, 80), "embed_dim": 16, "depth": 2, "num_heads": 2},
    "fan_tiny_8_p4_hybrid": {"img_size": 64, "embed_dim": 16, "depth": 2, "num_heads": 2, "convnext": (1, 1)},
    "pvt_tiny": {
        "img_size": 64,
        "depths": (1, 1, 1, 2),
        "embed_dims": (8, 8, 16, 16),
        "num_heads": (1, 1, 2, 2),
    },
    "localvit_tiny_mlp4_act3_r192": {
        "img_size": 64,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "se_reduction": 16,
    },
}


@cache
def small(name: str) -> nn.Module:
    return zoo.randomize(timm.create_model(name, num_classes=zoo.CLASSES, **SMALL[name]))


def relevance_terms(*given, **options):
    return relevance_pass(*given, **options)[0]


def gradmask_terms(*given, **options):
    return input_gradient_pass("gradmask", *given, **options)[0]


def rrr_terms(*given, **options):
    return input_gradient_pass("rrr", *given, **options)[0]
