"""Tiny segmenters and a tiny detector, each with a region or a detection to ask about: random, float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import timm
import torch
from torch import nn

import steadygaze as sg
from benchmarks.zoo import Entry, image_of, randomize

CLASSES = 5
SMALL = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 2, "num_labels": CLASSES}


def entries() -> Iterator[Entry]:
    """Every kind, asked about a box of its image."""
    for kind in KINDS:
        yield Entry("regions and detections", kind, partial(question, kind))


def segmenter(
    name: str = "vit_tiny_patch16_224", decoder: Literal["linear", "segformer"] = "linear", **options: Any
) -> nn.Module:
    """`sg.modules.segmenter` around a tiny model of timm."""
    small: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
    model = timm.create_model(name, **{**small, **options})
    return randomize(sg.modules.segmenter(model, CLASSES, decoder))


def swin_segmenter(decoder: Literal["linear", "segformer"] = "linear") -> nn.Module:
    """The same around a hierarchical model."""
    sizes: dict[str, Any] = {"depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
    return segmenter("swin_tiny_patch4_window7_224", decoder, patch_size=4, embed_dim=16, depth=None, **sizes)


def dpt(attention: str = "sdpa") -> nn.Module:
    """DPTForSemanticSegmentation: the neck reads the outputs of four of five blocks."""
    from transformers import DPTConfig, DPTForSemanticSegmentation

    config = DPTConfig(
        **SMALL,
        num_hidden_layers=5,
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 3, 4],
        neck_hidden_sizes=[8, 8, 12, 12],
        fusion_hidden_size=8,
        attn_implementation=attention,
    )
    return randomize(DPTForSemanticSegmentation(config))


def segformer() -> nn.Module:
    """SegformerForSemanticSegmentation with four stages."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_labels=CLASSES,
        depths=[1, 1, 2, 1],
        hidden_sizes=[8, 12, 16, 24],
        num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2],
        decoder_hidden_size=16,
    )
    return randomize(SegformerForSemanticSegmentation(config))


def yolos(middle: bool = True) -> nn.Module:
    """YolosForObjectDetection; middle: with positions that are added between blocks."""
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(
        **SMALL,
        num_hidden_layers=3,
        image_size=[32, 40],
        patch_size=8,
        num_detection_tokens=6,
        use_mid_position_embeddings=middle,
    )
    model = randomize(YolosForObjectDetection(config))
    with torch.no_grad():
        model.bbox_predictor.layers[-1].weight.mul_(0.2)  # boxes that differ, none at the image's border
        model.bbox_predictor.layers[-1].bias.zero_()
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "Segmenter of a ViT": segmenter,
    "Segmenter of a Swin": swin_segmenter,
    "Segmenter of a ViT, MLP decoder": partial(segmenter, decoder="segformer"),
    "Segmenter of a Swin, MLP decoder": partial(swin_segmenter, decoder="segformer"),
    "DPTForSemanticSegmentation": dpt,
    "SegformerForSemanticSegmentation": segformer,
    "YolosForObjectDetection": yolos,
    "YolosForObjectDetection, no middle positions": partial(yolos, middle=False),
}
IMAGE_SIZES = {
    kind: (64, 64) if "Segformer" in kind else (32, 40) if "Yolos" in kind else (32, 32) for kind in KINDS
}


def question(kind: str) -> tuple[nn.Module, str]:
    """The classifier of a region, or of a detection, and how the model was reduced."""
    with torch.random.fork_rng():
        model = KINDS[kind]()
    image = image_of(model, (3, *IMAGE_SIZES[kind]))
    box = (4, 8, 20, 28)
    asked = sg.Detection(box=box) if "Yolos" in kind else sg.Region(box=box)
    return sg.ask(model, region=asked, image=image), "depth 3 to 5, width 24"
