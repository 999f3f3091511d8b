"""Segmenters of torchvision by name: `torchvision:deeplabv3_resnet50`. Those of transformers are loaded as its classifiers are."""

from __future__ import annotations

from typing import Any

from steadygaze.loading.checkpoint import Weights, fit
from steadygaze.loading.hub import hub

HEADS = ("classifier.4", "classifier.low_classifier")  # what gives the scores: FCN and DeepLab; LR-ASPP


def segmenter_names() -> list[str]:
    """The segmenters of torchvision."""
    from torchvision import models

    return models.list_models(module=models.segmentation)


def torchvision_segmenter(
    name: str, weights: Weights | None, origin: str | None, num_classes: int | None
) -> dict[str, Any]:
    """As `load_model` wants it. Pictures are resized to a square of torchvision's size, for they are shown together."""
    from torchvision.models import get_model, get_model_weights

    from steadygaze.loading.load import head_width, transform

    default = get_model_weights(name).DEFAULT
    if weights is None:
        with hub(name):
            model = get_model(name, weights=default)
    else:
        count = num_classes or head_width(weights, HEADS)
        more: dict[str, Any] = {} if count is None else {"num_classes": count}
        more |= {"aux_loss": True} if any("aux_classifier." in key for key in weights) else {}
        model = get_model(name, weights=None, weights_backbone=None, **more)
        fit(model, weights, origin or "")
    preset, names = default.transforms(), default.meta["categories"]
    side = preset.resize_size[0]
    recipe = {
        "resize": [side, side],
        "crop": [],
        "interpolation": preset.interpolation.value,
        "mean": preset.mean,
        "std": preset.std,
    }
    head = next(module for key, module in model.named_modules() if key in HEADS)
    return {
        "model": model,
        "preprocess": transform(recipe, preset.mean, preset.std),
        "classes": tuple(names) if head.out_channels == len(names) else None,
        "source": "torchvision",
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
        "size": (side, side),
        "recipe": recipe,
    }
