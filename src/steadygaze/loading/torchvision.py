"""Classifiers and segmenters of torchvision: `torchvision:vit_b_16`, `torchvision:deeplabv3_resnet50`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import UnknownNameError
from steadygaze.loading.checkpoint import agreed_width, fit, hub
from steadygaze.loading.loaded import LoadedModel, ModelOptions
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


def build_torchvision_model(name: str, options: ModelOptions) -> LoadedModel:
    """Build a model of torchvision, see `build_model`; name: without the prefix."""
    from torchvision.models import get_model, get_model_weights

    segments = name in segmenter_names()
    if not segments and name not in classifier_names():
        raise UnknownNameError("torchvision model", name, [*classifier_names(), *segmenter_names()])
    published, weights = get_model_weights(name).DEFAULT, options.weights
    if weights is None:
        with hub(name):
            model = get_model(name, weights=published)
    else:
        heads = SEGMENTATION_HEADS if segments else [_head_name(name)]
        num_classes = agreed_width(options.num_classes, weights, heads, options.origin)
        arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
        if segments:
            arguments["weights_backbone"] = None
            if any("aux_classifier." in key for key in weights):
                arguments["aux_loss"] = True
        model = get_model(name, weights=None, **arguments)
        if not segments:
            model = restore(model, weights)
            weights = {module_name(key): value for key, value in weights.items()}
        fit(model, weights, options.origin)
    if segments:
        width = next(
            module for key, module in model.named_modules() if key in SEGMENTATION_HEADS
        ).out_channels
    else:
        width = _last_layer(model)[1]
    categories = published.meta["categories"]
    class_names = tuple(categories) if width == len(categories) else None
    preprocess = Preprocess.from_torchvision(published.transforms())
    return LoadedModel(model, PREFIX + name, preprocess, class_names, source="torchvision")


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
