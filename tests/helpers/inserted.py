"""Shared by tests."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from oracles.models import tiny
from steadygaze.modules import inserted

MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm class": partial(tiny, "class"),
    "timm registers, mean": lambda: zoo.plain("vit_medium_patch16_reg4_gap_256")[0],
    "timm distilled": lambda: zoo.plain("deit_tiny_distilled_patch16_224")[0],
    "timm DINOv2": lambda: zoo.plain("vit_base_patch14_reg4_dinov2")[0],
    "EVA-02": lambda: zoo.plain("eva02_tiny_patch14_224")[0],
    "EVA": lambda: zoo.plain("eva_large_patch14_196")[0],
    "BEiT": lambda: zoo.plain("beit_base_patch16_224")[0],
    "relative positions": lambda: zoo.plain("vit_relpos_base_patch16_clsgap_224")[0],
    "CaiT": lambda: zoo.plain("cait_xxs24_224")[0],
    "PiT": lambda: zoo.hierarchical("pit_ti_distilled_224", "pit")[0],
    "PVT v2": lambda: zoo.hierarchical("pvt_v2_b0", "pvt_v2")[0],
    "Swin": lambda: zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")[0],
    "torchvision": lambda: zoo.torchvision_model("vit_b_16")[0],
    "transformers ViT": lambda: zoo.transformers_model("ViTForImageClassification", "sdpa")[0],
    "transformers ViT, eager": lambda: zoo.transformers_model("ViTForImageClassification", "eager")[0],
    "transformers DeiT": lambda: zoo.transformers_model("DeiTForImageClassificationWithTeacher", "sdpa")[0],
    "transformers BEiT": lambda: zoo.transformers_model("BeitForImageClassification", "sdpa")[0],
    "transformers Data2Vec": lambda: zoo.transformers_model("Data2VecVisionForImageClassification", "sdpa")[
        0
    ],
    "transformers DINOv2": lambda: zoo.transformers_model(
        "Dinov2WithRegistersForImageClassification", "sdpa"
    )[0],
    "transformers SwiGLU": lambda: zoo.transformers_model("Dinov2ForImageClassification, SwiGLU", "sdpa")[0],
    "transformers DINOv3": lambda: zoo.transformers_model("DINOv3ViTModel and a head, gated MLP", "sdpa")[0],
    "transformers CLIP": lambda: zoo.transformers_model("CLIPForImageClassification", "sdpa")[0],
    "transformers SigLIP": lambda: zoo.transformers_model("SiglipForImageClassification", "sdpa")[0],
}


@cache
def plain(name: str) -> nn.Module:
    return MODELS[name]()


def images_of(model: nn.Module, batch: int = 2) -> Tensor:
    return zoo.image_of(model, sg.adapt(model).plan.input_size, batch=batch)


def trained(model: nn.Module, seed: int = 3) -> nn.Module:
    """Inserted modules with weights and statistics of ordinary size, in float64."""
    generator = torch.Generator().manual_seed(seed)
    for module in inserted(model).values():
        for p in module.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * (
                0.3 if p.dim() == 1 else 1.5 / p[0].numel() ** 0.5
            )
        for name, b in module.named_buffers():
            if name.endswith("running_var"):
                b.copy_(0.5 + torch.rand(b.shape, generator=generator))
            elif name.endswith("running_mean"):
                b.copy_(torch.randn(b.shape, generator=generator) * 0.2)
    return model.eval()
