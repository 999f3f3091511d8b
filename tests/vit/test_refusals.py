"""A model that is not a vision transformer is refused by its kind, with what to use instead."""

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import steadygaze as sg
from steadygaze.vit.unsupported import refusal


def transformers_model(name: str, config: str, **changes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**changes))


TINY_TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 30,
}
TINY_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
}
SEGFORMER = {
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1] * 4,
    "num_attention_heads": [1] * 4,
    "decoder_hidden_size": 8,
}

MODELS: dict[str, tuple[Any, str]] = {
    "timm CNN": (
        lambda: timm.create_model("resnet10t"),
        r"ResNet is a CNN.*pytorch-grad-cam.*steadygaze stress",
    ),
    "torchvision CNN": (torchvision.models.squeezenet1_0, "is a CNN"),
    "own CNN": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2)), "is a CNN"),
    "mixer": (lambda: timm.create_model("mixer_s32_224"), "an MLP model without attention"),
    "torchvision detector": (
        lambda: torchvision.models.detection.ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None
        ),
        "an object detector.*pytorch-grad-cam",
    ),
    "torchvision segmenter": (
        lambda: torchvision.models.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None
        ),
        "a segmenter.*suite segmentation",
    ),
    "video": (lambda: torchvision.models.video.r3d_18(weights=None), "a video model.*frames"),
    "text": (
        lambda: transformers_model("BertForSequenceClassification", "BertConfig", **TINY_TEXT),
        "a text model.*captum",
    ),
    "own text": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), "a text model"),
    "transformers segmenter": (
        lambda: transformers_model("SegformerForSemanticSegmentation", "SegformerConfig", **SEGFORMER),
        "a segmenter",
    ),
    "video transformer": (
        lambda: transformers_model("TimesformerForVideoClassification", "TimesformerConfig", **TINY_VIT),
        "a video model",
    ),
    "another architecture": (
        lambda: timm.create_model("mobilevit_xxs"),
        "attention of another architecture.*register_adapter",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_another_kind_is_named(kind: str) -> None:
    build, message = MODELS[kind]
    with pytest.raises(sg.UnsupportedModelError, match=message):
        sg.adapt(build().eval())


def test_a_cnn_of_ones_own_around_nothing_says_what_serves_it() -> None:
    class Cnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.first(images).mean((2, 3))

    with pytest.raises(sg.UnsupportedModelError, match=r"Cnn is a CNN, not a vision transformer"):
        sg.explain(Cnn(), torch.rand(1, 3, 8, 8))
    assert refusal(nn.Linear(2, 2)).startswith("torch.nn.modules.linear.Linear is not a vision transformer")
