"""Classifiers and segmenters of torchvision: `torchvision:vit_b_16`, `torchvision:deeplabv3_resnet50`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import UnknownNameError
from steadygaze.loading.checkpoint import Weights, fit, head_width, hub
from steadygaze.loading.loaded import BuiltModel
from steadygaze.modules import restore

PREFIX = "torchvision:"
SEGMENTATION_HEADS = ("classifier.4", "classifier.low_classifier")  # of FCN and DeepLab; of LR-ASPP


def classifier_names() -> list[str]:
    """The classifiers of torchvision, CNNs too."""
    from torchvision import models

    names: list[str] = models.list_models(module=models)
    return names


def vit_names() -> list[str]:
    """The classifiers of torchvision that `adapt` supports."""
    return [name for name in classifier_names() if name.startswith(("vit_", "swin_"))]


def segmenter_names() -> list[str]:
    """The segmenters of torchvision."""
    from torchvision import models

    names: list[str] = models.list_models(module=models.segmentation)
    return names


def build_torchvision_model(
    name: str, weights: Weights | None = None, origin: str = "", num_classes: int | None = None
) -> BuiltModel:
    """See `build_model`; name: without the prefix."""
    if name in segmenter_names():
        return _build_segmenter(name, weights, origin, num_classes)
    if name in classifier_names():
        return _build_classifier(name, weights, origin, num_classes)
    raise UnknownNameError("torchvision model", name, [*classifier_names(), *segmenter_names()])


def _build_classifier(name: str, weights: Weights | None, origin: str, num_classes: int | None) -> BuiltModel:
    from torchvision.models import get_model, get_model_weights

    published = get_model_weights(name).DEFAULT
    if weights is None:
        with hub(name):
            model = get_model(name, weights=published)
    else:
        num_classes = num_classes or head_width(weights, [_head_name(name)])
        options = {} if num_classes is None else {"num_classes": num_classes}
        model = restore(get_model(name, weights=None, **options), weights)
        fit(model, {module_name(key): value for key, value in weights.items()}, origin)
    categories = published.meta["categories"]
    class_names = tuple(categories) if _last_layer(model)[1] == len(categories) else None
    return BuiltModel(model, Preprocess.from_torchvision(published.transforms()), class_names, "torchvision")


def _build_segmenter(name: str, weights: Weights | None, origin: str, num_classes: int | None) -> BuiltModel:
    from torchvision.models import get_model, get_model_weights

    published = get_model_weights(name).DEFAULT
    if weights is None:
        with hub(name):
            model = get_model(name, weights=published)
    else:
        num_classes = num_classes or head_width(weights, SEGMENTATION_HEADS)
        options: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
        if any("aux_classifier." in key for key in weights):
            options["aux_loss"] = True
        model = get_model(name, weights=None, weights_backbone=None, **options)
        fit(model, weights, origin)
    categories = published.meta["categories"]
    head = next(module for key, module in model.named_modules() if key in SEGMENTATION_HEADS)
    class_names = tuple(categories) if head.out_channels == len(categories) else None
    return BuiltModel(model, Preprocess.from_torchvision(published.transforms()), class_names, "torchvision")


def _head_name(name: str) -> str:
    from torchvision.models import get_model

    try:
        with torch.device("meta"):
            model = get_model(name, weights=None)
    except NotImplementedError:  # RegNet computes with tensors in its constructor
        model = get_model(name, weights=None)
    return _last_layer(model)[0]


def _last_layer(model: nn.Module) -> tuple[str, int]:
    """Name and width of the layer that gives the logits, in torchvision the last linear or convolution."""
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    name, layer = layers[-1]
    return name, len(layer.weight)


def module_name(key: str) -> str:
    """The name in today's modules of a tensor in a published file.

    The files call the two layers of an MLP linear_1 and linear_2, the modules 0 and 3; and the first
    layers of a DenseNet's block norm.1 and so on, the modules norm1.
    """
    key = key.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3.")
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key)
