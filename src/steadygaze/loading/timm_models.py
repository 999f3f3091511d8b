"""Models of timm, and those of this package, which timm registers under their own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

import steadygaze.models  # noqa: F401 - registers RVT, FAN, PVT and LocalViT with timm
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import BadInput
from steadygaze.loading.checkpoint import Weights, fit, head_width, match_names
from steadygaze.loading.hub import hub
from steadygaze.loading.loaded import BuiltModel
from steadygaze.modules import restore

HUB_PREFIXES = ("hf-hub:", "hf_hub:")


def is_timm_name(name: str) -> bool:
    """Whether timm can create a model of this name: registered, with or without a tag, or from the hub."""
    import timm

    return name.startswith(HUB_PREFIXES) or timm.is_model(name.split(".")[0])


def build_timm_model(
    name: str,
    weights: Weights | None = None,
    origin: str = "",
    num_classes: int | None = None,
    *,
    pretrained: bool = True,
    arguments: Mapping[str, Any] | None = None,
    new_head: bool = False,
) -> BuiltModel:
    """See `build_model`."""
    if weights is None:
        model = create_timm_model(name, num_classes, pretrained=pretrained, arguments=arguments)
    else:
        if num_classes is None and not new_head:
            num_classes = head_width(weights, classifier_names(name))
        model = create_timm_model(name, num_classes, pretrained=False, arguments=arguments)
        model = restore(model, weights)
        fit(model, with_own_head(model, weights) if new_head else weights, origin)
    preprocess = Preprocess.from_timm_model(model)
    image_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if arguments and image_size:  # the arguments may have changed it
        preprocess = Preprocess({**preprocess.config, "input_size": (3, *image_size)})
    trained = weights is not None or pretrained
    return BuiltModel(model, preprocess, imagenet_class_names(model) if trained else None, "timm")


def create_timm_model(
    name: str,
    num_classes: int | None = None,
    *,
    pretrained: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """`timm.create_model`. Errors of the hub become `BadCheckpoint`, those of the arguments `BadInput`."""
    import timm

    options = {} if num_classes is None else {"num_classes": num_classes}
    options |= arguments or {}

    def create() -> nn.Module:
        try:
            model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
        except (TypeError, AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
            if not arguments:
                raise
            reason = f"{name} cannot be built with {dict(arguments)} ({error})"
            raise BadInput(f"arguments: {reason}") from error
        return model

    if not pretrained:
        return create()
    with hub(name):
        return create()


def classifier_names(name: str) -> list[str]:
    """Names of the layers that give the logits, as timm's configuration of the model lists them."""
    import timm

    listed: str | Sequence[str] | None = timm.get_pretrained_cfg_value(name, "classifier")
    return [listed or "head"] if isinstance(listed, str | None) else list(listed)


def with_own_head(model: Any, weights: Weights) -> Weights:
    """The weights with the model's own classifier in place of theirs."""
    listed = model.default_cfg.get("classifier")
    heads = [listed or "head"] if isinstance(listed, str | None) else list(listed)
    own = {
        key: value
        for key, value in model.state_dict().items()
        if any(key.startswith(f"{head}.") for head in heads)
    }
    return {key: value for key, value in match_names(weights, model).items() if key not in own} | own


def imagenet_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """The class names of a model with the classes of ImageNet-1k, -12k, -21k or -22k; None for others."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i) for i in range(info.num_classes()))
