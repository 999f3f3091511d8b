"""Models of timm, and those of this package, which timm registers under their own names."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

import steadygaze.models  # noqa: F401 - registers RVT, FAN, PVT and LocalViT with timm
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import CheckpointError, InputError
from steadygaze.loading.checkpoint import Weights, agreed_width, fit, hub, match_names
from steadygaze.loading.loaded import LoadedModel, ModelOptions
from steadygaze.modules import restore

HUB_PREFIXES = ("hf-hub:", "hf_hub:")
PROJECTIONS = ("dino_head.", "ibot_head.", "head.mlp.", "head.last_layer.")  # of pretraining by DINO
SPARE_ELEMENTS = 10_000_000  # that a model may have beyond twice those of its file


def without_prefix(name: str) -> str:
    """The name of a model of timm without `timm:` or `timm/` in front of it."""
    return name.removeprefix("timm:").removeprefix("timm/")


def is_timm_name(name: str) -> bool:
    """Whether timm can create a model of this name: registered, with or without a tag, or from the hub."""
    import timm

    return name.startswith(HUB_PREFIXES) or timm.is_model(name.split(".")[0])


def build_timm_model(name: str, options: ModelOptions) -> LoadedModel:
    """Build a model of timm, see `build_model`; name: without the prefix."""
    from timm import get_pretrained_cfg_value

    weights, num_classes, arguments = options.weights, options.num_classes, options.arguments
    if weights is None:
        model = create_timm_model(name, num_classes, pretrained=options.pretrained, arguments=arguments)
    else:
        if not options.new_head:
            heads = _head_names(get_pretrained_cfg_value(name, "classifier"))
            num_classes = agreed_width(num_classes, weights, heads, options.origin)
        model = create_timm_model(name, num_classes, pretrained=False, arguments=arguments)
        weights = with_timm_names(weights, model)
        if "img_size" in arguments:
            weights = _resized_positions(weights, model)
        model = restore(model, weights)
        fit(model, with_own_head(model, weights) if options.new_head else weights, options.origin)
    trained = weights is not None or options.pretrained
    class_names = imagenet_class_names(model) if trained else None
    return LoadedModel(model, name, Preprocess.from_timm_model(model), class_names, source="timm")


def create_timm_model(
    name: str, num_classes: int | None, *, pretrained: bool, arguments: Mapping[str, Any]
) -> nn.Module:
    """`timm.create_model`. Hub errors become `CheckpointError`, those of arguments `InputError`."""
    import timm

    classes = {} if num_classes is None else {"num_classes": num_classes}
    with hub(name) if pretrained else nullcontext():
        try:
            model: nn.Module = timm.create_model(name, pretrained=pretrained, **classes, **arguments)
        except (TypeError, AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
            if not arguments:
                raise
            reason = f"{name} cannot be built with {dict(arguments)} ({error})"
            raise InputError(f"arguments: {reason}") from error
        return model


@cache
def constructor_arguments(name: str) -> frozenset[str]:
    """Names of the keyword arguments that the model's class, and timm's function for this model, take."""
    import timm

    functions: list[Any] = [timm.model_entrypoint(name)]
    for kind in type(_meta_model(name)).__mro__:
        constructor = vars(kind).get("__init__")
        if constructor is None:
            continue
        functions.append(constructor)
        if not any(p.kind is p.VAR_KEYWORD for p in signature(constructor).parameters.values()):
            break
    names = {
        p.name
        for function in functions
        for p in signature(function).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    return frozenset(names - {"self", "pretrained", "num_classes"})


def check_model_size(
    name: str, num_classes: int | None, arguments: Mapping[str, Any], weights: Weights, origin: str
) -> None:
    """Raise `CheckpointError` if the model is much larger than the file, before its memory is allocated."""
    if name.startswith(HUB_PREFIXES) or not is_timm_name(name):
        return
    try:
        classes = {} if num_classes is None else {"num_classes": num_classes}
        model = _meta_model(name, **classes, **arguments)
    except Exception as error:  # of constructors that were given odd values
        raise CheckpointError(
            f"{origin}: {name} cannot be built with {dict(arguments)} ({type(error).__name__}: {error})"
        ) from error
    needed = sum(tensor.numel() for tensor in model.state_dict().values())
    available = sum(tensor.numel() for tensor in weights.values())
    if needed > 2 * available + SPARE_ELEMENTS:
        raise CheckpointError(
            f"{origin} does not fit {name}: the model that it describes has {needed:,} elements, the file "
            f"{available:,}"
        )


def number_of_elements(name: str, **arguments: Any) -> int:
    """Elements of a model's state dict, counted without memory for them where its constructor allows that."""
    return sum(tensor.numel() for tensor in _meta_model(name, **arguments).state_dict().values())


def _meta_model(name: str, **arguments: Any) -> nn.Module:
    """The model without memory for its weights, where its constructor allows that."""
    import timm

    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        model = timm.create_model(name, pretrained=False, **arguments)  # it computes with tensors
    return model


def _head_names(listed: str | Sequence[str] | None) -> list[str]:
    """Names of the layers that give the logits, from what timm's configuration of a model lists."""
    return [listed or "head"] if isinstance(listed, str | None) else list(listed)


def with_own_head(model: Any, weights: Weights) -> Weights:
    """The weights with the model's own classifier in place of theirs."""
    heads = _head_names(model.default_cfg.get("classifier"))
    own = {
        key: value
        for key, value in model.state_dict().items()
        if any(key.startswith(f"{head}.") for head in heads)
    }
    return {key: value for key, value in match_names(weights, model).items() if key not in own} | own


def with_timm_names(weights: Weights, model: nn.Module) -> Weights:
    """Weights of DINOv2 as its authors publish them, under timm's names; others as they are.

    The mask token and the projection heads serve pretraining only. With registers, timm adds the position of
    the class token to the token itself. DINO's files have timm's names.
    """
    backbone = {name: value for name, value in weights.items() if name.startswith("backbone.")}
    if backbone and all(name in backbone or name.startswith(PROJECTIONS) for name in weights):
        weights = backbone
    weights = match_names(weights, model)
    if "mask_token" not in weights or "mask_token" in model.state_dict():
        return weights
    renamed = {
        re.sub(r"\.mlp\.w3\.", ".mlp.fc2.", re.sub(r"\.mlp\.w12\.", ".mlp.fc1.", name)): value
        for name, value in weights.items()
        if name != "mask_token"
    }
    if {"register_tokens", "cls_token", "pos_embed"} <= renamed.keys():
        positions = renamed["pos_embed"]
        renamed["reg_token"] = renamed.pop("register_tokens")
        renamed["cls_token"] = renamed["cls_token"] + positions[:, :1]
        renamed["pos_embed"] = positions[:, 1:]
    return renamed


def _resized_positions(weights: Weights, model: nn.Module) -> Weights:
    """Position embeddings for the model's image size, interpolated by timm as it does for its own weights."""
    resize = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    patches = "patch_embed.proj.weight"
    own = model.state_dict().get(patches)
    if resize is None or own is None or patches not in weights or weights[patches].shape != own.shape:
        return weights  # timm would also interpolate patches of another size: those are of another model
    resized: Weights = resize(dict(weights), model)
    return resized


def imagenet_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """The class names of a model with the classes of ImageNet-1k, -12k, -21k or -22k; None for others."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    if not subset or getattr(model, "num_classes", None) == 0:  # timm also names what the file was trained on
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i) for i in range(info.num_classes()))
