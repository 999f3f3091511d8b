"""The one model factory: from a name, and weights if there are any, to a model with its preprocessing.

`load_model`, recipes of `steadygaze train` and run folders all build their models here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnknownNameError, suggestions
from steadygaze.loading.checkpoint import Weights, fit, read_weights
from steadygaze.loading.loaded import BuiltModel
from steadygaze.loading.open_clip import PREFIX as OPEN_CLIP_PREFIX
from steadygaze.loading.open_clip import build_open_clip_model
from steadygaze.loading.timm import build_timm_model, is_timm_name
from steadygaze.loading.torchvision import PREFIX, build_torchvision_model, vit_names
from steadygaze.loading.transformers import build_transformers_model
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


def build_model(
    name: str,
    weights: Weights | None = None,
    *,
    origin: str = "",
    num_classes: int | None = None,
    pretrained: bool = True,
    arguments: Mapping[str, Any] | None = None,
    new_head: bool = False,
    trust_remote_code: bool = False,
    fallback: Preprocess | None = None,
) -> BuiltModel:
    """The model of that name (see the table in `load`), on the CPU.

    weights: to be loaded, with the modules (TAP, CB) that they name; `origin` names their file in errors
    num_classes: width of the classifier; by default that of the weights, or the model's own
    pretrained: without `weights`, load the published ones; False keeps the random initialization
    arguments: for timm's constructor, such as depth=6
    new_head: keep the classifier at its random initialization and load all other weights
    trust_remote_code: execute code that a transformers folder or repository contains
    fallback: preprocessing of a transformers folder that has no image processor

    Only models of timm (and of this package) can be built without weights, with arguments or with a new head.
    """
    timm_name = name.removeprefix("timm:").removeprefix("timm/")
    only_timm = bool(arguments) or new_head or (weights is None and not pretrained)
    if is_timm_name(timm_name) and not _is_transformers_folder(name):
        return build_timm_model(
            timm_name,
            weights,
            origin,
            num_classes,
            pretrained=pretrained,
            arguments=arguments,
            new_head=new_head,
        )
    if only_timm:
        import timm

        near = suggestions(name, timm.list_models())
        guess = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        raise InputError(
            f"{name!r} is not a timm model{guess}: arguments of the constructor and a new head are for timm "
            "models only"
        )
    if name == EMBEDDED:
        return build_embedded_model(weights, origin)
    if name.startswith(PREFIX):
        return build_torchvision_model(name.removeprefix(PREFIX), weights, origin, num_classes)
    if name.startswith(OPEN_CLIP_PREFIX):
        return build_open_clip_model(name.removeprefix(OPEN_CLIP_PREFIX), weights, origin)
    if "/" in name or Path(name).is_dir():
        return build_transformers_model(
            name, weights, origin, num_classes, trust_remote_code=trust_remote_code, fallback=fallback
        )
    raise _unknown(name)


def _is_transformers_folder(name: str) -> bool:
    return (Path(name) / "config.json").is_file()


def _unknown(name: str) -> UnknownNameError:
    import timm

    known = [*timm.list_models(), EMBEDDED, *(PREFIX + other for other in vit_names())]
    return UnknownNameError("model", name, known, "List them with list_models(PATTERN).")
