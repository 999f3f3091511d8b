"""The one model factory: from a name, and weights if there are any, to a model with its preprocessing.

`load_model`, recipes of `steadygaze train` and run folders all build their models here.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import CheckpointError, InputError, UnknownNameError, suggestions
from steadygaze.loading.checkpoint import fit, read_weights
from steadygaze.loading.loaded import LoadedModel, ModelOptions
from steadygaze.loading.open_clip import PREFIX as OPEN_CLIP_PREFIX
from steadygaze.loading.open_clip import build_open_clip_model
from steadygaze.loading.options import MAX_SIDE
from steadygaze.loading.paths import check_model_path
from steadygaze.loading.timm import build_timm_model, is_timm_name, without_prefix
from steadygaze.loading.torchvision import PREFIX, build_torchvision_model, vit_names
from steadygaze.loading.transformers import build_transformers_model
from steadygaze.modules import restore

EMBEDDED = "embedded"


def build_model(name: str, options: ModelOptions) -> LoadedModel:
    """The model of that name (see the table in `load`), on the CPU, without a hash of its weights.

    Only models of timm (and of this package) can be built without weights, with arguments or with a new head.
    """
    built = _build(name, options)
    width = len(built.class_names or ())
    if options.num_classes is not None and (
        built.source == "open_clip" or width not in (0, options.num_classes)
    ):
        reason = f"has {width:,} classes" if width else "has no classifier: it compares images with text"
        raise InputError(
            f"num_classes={options.num_classes}: {name} {reason}. Leave it out, or give a checkpoint of a "
            "classifier with that many classes.",
            option="num_classes",
        )
    config = built.preprocess.config
    sides = [*built.preprocess.size, *np.ravel(config.get("resize") or 0).tolist()]
    if not all(isinstance(side, int) and 0 <= side <= MAX_SIDE for side in sides):
        raise CheckpointError(
            f"{name}: expected images of at most {MAX_SIDE} pixels a side, but its configuration states "
            f"{'x'.join(map(str, sides))[:80]}"
        )
    return built


def _build(name: str, options: ModelOptions) -> LoadedModel:
    timm_name = without_prefix(name)
    if is_timm_name(timm_name) and not (Path(name) / "config.json").is_file():
        return build_timm_model(timm_name, options)
    if options.arguments or options.new_head or (options.weights is None and not options.pretrained):
        import timm

        near = suggestions(name, timm.list_models())
        guess = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        raise InputError(
            f"{name!r} is not a timm model{guess}: arguments of the constructor and a new head are for timm "
            "models only"
        )
    if name == EMBEDDED:
        return _build_embedded_model(options)
    if name.startswith(PREFIX):
        return build_torchvision_model(name.removeprefix(PREFIX), options)
    if name.startswith(OPEN_CLIP_PREFIX):
        return build_open_clip_model(name.removeprefix(OPEN_CLIP_PREFIX), options)
    check_model_path(name)
    if "/" in name or Path(name).is_dir():
        return build_transformers_model(name, options)
    import timm

    known = [*timm.list_models(), EMBEDDED, *(PREFIX + other for other in vit_names())]
    raise UnknownNameError("model", name, known, "List them with list_models(PATTERN).")


def _build_embedded_model(options: ModelOptions) -> LoadedModel:
    """The model with the weights of this package, or with those given."""
    from timm.models.vision_transformer import VisionTransformer

    assets = files("steadygaze") / "assets"
    card = json.loads((assets / "embedded.json").read_text(encoding="utf-8"))
    weights, origin = options.weights, options.origin
    if weights is None:
        weights, origin = read_weights(str(assets / "embedded.safetensors")), EMBEDDED
    model = restore(VisionTransformer(**card["arguments"]), weights)
    fit(model, weights, origin)
    side = card["image_size"]
    preprocess = Preprocess.resize_and_crop(
        (side, side), interpolation=card["interpolation"], mean=card["mean"], std=card["std"]
    )
    return LoadedModel(model, EMBEDDED, preprocess, tuple(card["classes"]), source=EMBEDDED)
