"""Weights that `steadygaze train` wrote say what makes their model again: name, arguments, modules, classes, preprocessing."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from steadygaze.errors import BadCheckpoint, BadInput
from steadygaze.loading.checkpoint import Weights, fit

WEIGHTS = "model.safetensors"
INSIDE = "backbone."  # the names of a segmenter's vision transformer begin so


def told_by(checkpoint: str | Path) -> dict[str, Any] | None:
    """What a .safetensors file says of its model; None for a file of another make, or none at all."""
    path = Path(checkpoint)
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get("steadygaze")
    except (OSError, SafetensorError):
        return None  # `read_weights` says what is wrong with it
    return None if text is None else json.loads(text)


def run_weights(name: str) -> Path | None:
    """The weights of a folder that `steadygaze train` wrote; None if the name is no such folder."""
    folder = Path(name)
    if not (folder / "train.json").is_file():
        return None
    if not (folder / WEIGHTS).is_file():
        raise BadCheckpoint(
            f"{folder} is a training run that has not written {WEIGHTS} yet: let it finish an epoch"
        )
    return folder / WEIGHTS


def register() -> None:
    """Let timm know the models of this package, if they are there."""
    with suppress(ImportError):
        import_module("steadygaze.models")


def with_modules(model: Any, weights: Weights) -> Any:
    """The model with the modules that the weights name; the model itself if they name none."""
    if any(name.endswith("_extra_state") for name in weights):
        return import_module("steadygaze.modules").restore(
            model, weights
        )  # by name: modules are built upon views
    return model


def remade(
    about: dict[str, Any], weights: Weights, origin: str, num_classes: int | None, other: Callable[..., Any]
) -> dict[str, Any]:
    """The model, as `load_model` wants it; `other` makes those that are not of timm, from their name and weights.

    Of a segmenter (`segments`: its classes), the vision transformer inside is made first, then the segmenter around it.
    """
    import timm
    from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset

    register()
    count, whole = about["num_classes"], weights
    if "segments" in about:
        weights = {
            name.removeprefix(INSIDE): value for name, value in weights.items() if name.startswith(INSIDE)
        }
    if num_classes not in (None, count):
        raise BadInput(f"num_classes: {origin} was trained with {count} classes, got {num_classes}")
    library = about.get("library", "timm")
    if library == "timm":
        model = timm.create_model(about["model"], pretrained=False, num_classes=count, **about["arguments"])
        model = with_modules(model, weights)
        fit(model, weights, origin)
        subset = infer_imagenet_subset(model)
        info = (
            ImageNetInfo(subset) if subset and about["classes"] is None and "segments" not in about else None
        )
        names = (
            about["classes"]
            if info is None
            else [info.index_to_description(i) for i in range(info.num_classes())]
        )
    else:
        made = other(about["model"], weights, origin, count)
        model, names = made["model"], about["classes"] or made["classes"]
    if "segments" in about:
        model = import_module("steadygaze.modules").segmenter(model, about["segments"])
        fit(model, whole, origin)
    config = {
        "input_size": (3, *about["size"]), "interpolation": about["interpolation"], "mean": tuple(about["mean"]),
        "std": tuple(about["std"]), "crop_pct": about["crop"], "crop_mode": "center",
    }  # fmt: skip
    return {
        "model": model,
        "preprocess": create_transform(**config, is_training=False),
        "classes": None if names is None else tuple(names),
        "source": library,
        "mean": config["mean"],
        "std": config["std"],
        "size": tuple(about["size"]),
        "recipe": config,
    }
