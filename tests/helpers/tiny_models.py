"""Tiny models of every supported architecture; float64, every parameter random."""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.layers import RmsNorm
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import text_zoo, zoo
from oracles.models import KINDS, tiny


def _changed(**changes: Any) -> nn.Module:
    return zoo.randomize(tiny("class", **changes))


def _timm(name: str) -> nn.Module:
    return zoo.plain(name)[0]


def _hf(kind: str, attention: str) -> nn.Module:
    return zoo.transformers_model(kind, attention)[0]


PLAIN: dict[str, Callable[[], nn.Module]] = {kind: partial(tiny, kind) for kind in KINDS} | {
    "RMS norms": partial(_changed, norm_layer=RmsNorm, qk_norm=True),
    "norms behind": partial(_changed, block_fn=ResPostBlock),
    "parallel branches": partial(_changed, block_fn=ParallelThingsBlock),
    "attention pool (SigLIP)": partial(_timm, "vit_base_patch16_siglip_224"),
    "QuickGELU (CLIP)": partial(_timm, "vit_base_patch16_clip_quickgelu_224"),
    "SwiGLU (DINOv2)": partial(_timm, "vit_giant_patch14_dinov2"),
    "distilled DeiT": partial(_timm, "deit_tiny_distilled_patch16_224"),
    "EVA-02 tiny (rotary, SwiGLU)": partial(_timm, "eva02_tiny_patch14_224"),
    "EVA-02 base (sub-LN)": partial(_timm, "eva02_base_patch14_224"),
    "EVA (mean)": partial(_timm, "eva_large_patch14_196"),
    "BEiT": partial(_timm, "beit_base_patch16_224"),
    "BEiT v2": partial(_timm, "beitv2_base_patch16_224"),
    "relative positions": partial(_timm, "vit_relpos_small_patch16_224"),
    "shared relative positions": partial(_timm, "vit_srelpos_small_patch16_224"),
    "CaiT": partial(_timm, "cait_xxs24_224"),
    "torchvision": lambda: zoo.torchvision_model("vit_b_16")[0],
    "transformers ViT": partial(_hf, "ViTForImageClassification", "sdpa"),
    "transformers BEiT": partial(_hf, "BeitForImageClassification", "sdpa"),
    "transformers DINOv2 registers": partial(_hf, "Dinov2WithRegistersForImageClassification", "sdpa"),
    "transformers DINOv2 SwiGLU": partial(_hf, "Dinov2ForImageClassification, SwiGLU", "sdpa"),
    "transformers DINOv3": partial(_hf, "DINOv3ViTModel and a head", "sdpa"),
    "transformers DINOv3 gated": partial(_hf, "DINOv3ViTModel and a head, gated MLP", "sdpa"),
    "transformers CLIP": partial(_hf, "CLIPForImageClassification", "sdpa"),
    "transformers SigLIP": partial(_hf, "SiglipForImageClassification", "sdpa"),
    "transformers CLIP and text": lambda: text_zoo.classifier("CLIPModel")[0],
    "transformers SigLIP and text": lambda: text_zoo.classifier("SiglipModel")[0],
}
EAGER = {
    f"{name}, eager": partial(_hf, kind, "eager")
    for name, kind in (
        ("transformers ViT", "ViTForImageClassification"),
        ("transformers BEiT", "BeitForImageClassification"),
        ("transformers DINOv3", "DINOv3ViTModel and a head"),
        ("transformers CLIP", "CLIPForImageClassification"),
    )
}
SEARCHES = {  # searched methods with a few runs
    "occlusion": "occlusion:budget=3",
    "rise": "rise:budget=3",
    "lime": "lime:budget=3",
    "kernel_shap": "kernel_shap:budget=4",
    "pami": "pami:budget=3",
    "hsic": "hsic:budget=3",
    "scorecam": "scorecam:budget=2",
    "vit_cx": "vit_cx:budget=2",
    "tis": "tis:budget=2,clusters=4",
    "atman": "atman:budget=3",
    "sufficient": "sufficient:budget=4,minimal=false",
    "greedy": "greedy:budget=40",
    "smdl": "smdl:budget=60",
    "caap": "caap:budget=3",
}
HIERARCHICAL = {
    "Swin": lambda: zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")[0],
    "PVT v2": lambda: zoo.hierarchical("pvt_v2_b0", "pvt_v2")[0],
    "Hiera": lambda: zoo.hierarchical("hiera_tiny_224", "hiera")[0],
}
ALL = PLAIN | EAGER | HIERARCHICAL
REPRESENTATIVE = (  # of the default tier
    "class",
    "registers",
    "average",
    "pre_norm",
    "attention pool (SigLIP)",
    "EVA-02 tiny (rotary, SwiGLU)",
    "transformers DINOv3",
    "Swin",
)


def images_of(model: nn.Module, batch: int = 2, seed: int = 0) -> Tensor:
    """Noise (B,3,H,W) of the size that the model takes."""
    return zoo.image_of(model, sg.adapt(model).plan.input_size, batch=batch, seed=seed)


def served(model: nn.Module) -> list[str]:
    """The names of all methods that can explain this model."""
    from steadygaze.methods.registry import unavailable

    vit = sg.adapt(model)
    return [info.name for info in sg.list_methods() if not unavailable(sg.method(info.name), vit)]
