"""The small CIFAR-10 vision transformer inside this package."""

from __future__ import annotations

import json
from importlib.resources import files

from steadygaze.data.preprocess import Preprocess
from steadygaze.loading.checkpoint import Weights, fit, read_weights
from steadygaze.loading.loaded import BuiltModel
from steadygaze.modules import restore

EMBEDDED = "embedded"


def build_embedded_model(weights: Weights | None = None, origin: str = "") -> BuiltModel:
    """The model with the weights of this package, or with those given."""
    from timm.models.vision_transformer import VisionTransformer

    assets = files("steadygaze") / "assets"
    card = json.loads((assets / "embedded.json").read_text(encoding="utf-8"))
    if weights is None:
        weights, origin = read_weights(str(assets / "embedded.safetensors")), EMBEDDED
    model = restore(VisionTransformer(**card["arguments"]), weights)
    fit(model, weights, origin)
    side = card["image_size"]
    preprocess = Preprocess.resize_and_crop(
        (side, side), interpolation=card["interpolation"], mean=card["mean"], std=card["std"]
    )
    return BuiltModel(model, preprocess, tuple(card["classes"]), EMBEDDED)
