"""From a recipe to the model that is trained: made or loaded, its modules put in, and what its pictures look like."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from torch import nn

from steadygaze.data.folders import Classes
from steadygaze.data.label_maps import Segmented, find_maps
from steadygaze.errors import BadCheckpoint, BadInput, UnknownName
from steadygaze.loading.checkpoint import Weights, fit, match_names, read_weights
from steadygaze.loading.load import head_width, load_model
from steadygaze.loading.run_folder import told_by, with_modules
from steadygaze.training.data import Shape, class_names, drawn_from
from steadygaze.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Built:
    """The model of a recipe, ready to be trained."""

    model: nn.Module
    classes: Classes
    shape: Shape
    about: dict[str, Any]  # what makes the model again: name, arguments, modules, classes, preprocessing

    @property
    def metadata(self) -> dict[str, str]:
        """For the file of the weights: what makes the model again."""
        return {"steadygaze": json.dumps(self.about, ensure_ascii=False)}


def build(recipe: Recipe) -> Built:
    """Make the model; new weights depend on the recipe's seed alone."""
    maps = find_maps(recipe.data.train, recipe.data.masks, "train") if recipe.task == "segmentation" else None
    names = class_names(recipe.data.train) if maps is None else None
    with drawn_from(recipe.seed, 2):
        model, config, known, origin = _made(recipe, names)
        inside = _with_modules(_inside(model, recipe), recipe)
        model = inside if maps is None else _segmenter(model, inside, maps)
    outputs = _outputs(inside, config)
    names = (
        known
        if known is not None and len(known) == outputs
        else names
        if names is not None and len(names) == outputs
        else None
    )
    shape = Shape.of(config, recipe.data)
    if recipe.data.size is not None and tuple(shape.size) != tuple(config["input_size"][1:]):
        _try(model, shape.size)
    if recipe.augment.crop == "resize" and recipe.augment.resize < max(shape.size):
        raise BadInput(
            f"augment.resize: expected at least the size of the pictures, {max(shape.size)}, got {recipe.augment.resize}"
        )
    about = {
        "classes": None if names is None or known is names else list(names), **origin, "num_classes": outputs,
        "modules": asdict(recipe.modules), "mean": shape.mean, "std": shape.std, "size": shape.size,
        "interpolation": shape.interpolation, "crop": shape.crop,
    }  # fmt: skip
    if maps is not None:
        about |= {"segments": maps.classes, "classes": None if maps.names is None else list(maps.names)}
    return Built(model, Classes(names, outputs), shape, about)


def _inside(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The vision transformer: what is inside a segmenter, or the model itself."""
    from steadygaze.modules import Segmenter

    if isinstance(model, Segmenter) and recipe.task != "segmentation":
        raise BadInput(
            "model: its weights are of a segmenter. Give task = 'segmentation', or the weights of a classifier."
        )
    return model.backbone if isinstance(model, Segmenter) else model


def _segmenter(model: nn.Module, inside: nn.Module, maps: Segmented) -> nn.Module:
    """A segmenter around the vision transformer; one that the weights have brought goes on, if it tells the same classes apart."""
    from steadygaze.modules import Segmenter, segmenter

    if not isinstance(model, Segmenter):
        return segmenter(inside, maps.classes)
    if model.classes != maps.classes:
        raise BadInput(
            f"model: its weights are of a segmenter of {model.classes} classes, but the masks have {maps.classes}"
        )
    model.backbone = inside
    return model


def _is_timm(name: str) -> bool:
    import timm

    with suppress(ImportError):
        import_module("steadygaze.models")  # RVT, FAN and others, for timm to know
    return timm.is_model(name)


Origin = dict[
    str, Any
]  # of a model: its name, the arguments it is made with, the library; names of its classes from a run before


def _made(
    recipe: Recipe, names: tuple[str, ...] | None
) -> tuple[nn.Module, dict[str, Any], tuple[str, ...] | None, Origin]:
    """(model, its preprocessing as timm words it, the names of its classes, what makes it again)."""
    import timm
    from timm.data import resolve_data_config

    asked = recipe.model
    told = None if asked.checkpoint is None else told_by(asked.checkpoint)
    trained = told is not None and told["model"] == asked.name and asked.arguments in ({}, told["arguments"])
    if not _is_timm(asked.name) or (trained and not asked.new_head):
        if asked.new_head or (asked.arguments and not trained):
            near = get_close_matches(asked.name, timm.list_models(), n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise BadInput(
                f"model.arguments, model.new_head: {asked.name!r} is no model of timm{meant}, and only those are made anew"
            )
        return _loaded(recipe)
    if asked.pretrained and asked.checkpoint:
        raise BadInput("model.pretrained, model.checkpoint: expected one of them, got both")
    if asked.pretrained and not asked.arguments and not asked.new_head:
        return _loaded(recipe)
    count = asked.num_classes
    weights = None if asked.checkpoint is None else read_weights(asked.checkpoint)
    if count is None and (weights is None or asked.new_head):
        count = None if names is None else len(names)
    elif count is None and weights is not None:
        count = head_width(weights, _heads(timm.get_pretrained_cfg_value(asked.name, "classifier")))
    try:
        width = {} if count is None else {"num_classes": count}
        model = timm.create_model(asked.name, pretrained=asked.pretrained, **width, **asked.arguments)
    except (TypeError, AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"model.arguments: {asked.name} cannot be made with {asked.arguments} ({error})"
        ) from error
    except OSError as error:
        raise BadCheckpoint(
            f"the weights of {asked.name} could not be fetched ({error}). Give model.checkpoint, a file."
        ) from error
    if weights is not None:
        model = with_modules(model, weights)
        _fill(model, weights, asked.checkpoint or "", asked.new_head)
    known = None
    if weights is not None or asked.pretrained:
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = infer_imagenet_subset(model)
        info = ImageNetInfo(subset) if subset else None
        known = tuple(info.index_to_description(i) for i in range(info.num_classes())) if info else None
    config = resolve_data_config(model.pretrained_cfg, model=model)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return (
        model,
        config | ({"input_size": (3, *size)} if size else {}),
        known,
        {"model": asked.name, "arguments": asked.arguments},
    )


def _loaded(recipe: Recipe) -> tuple[nn.Module, dict[str, Any], tuple[str, ...] | None, Origin]:
    """A model as `load_model` gives it, with the preprocessing that it has there."""
    asked = recipe.model
    loaded = load_model(asked.name, asked.checkpoint, num_classes=asked.num_classes)
    before = (
        None if loaded.checkpoint is None else told_by(loaded.checkpoint)
    )  # of a run that goes on from another one
    words, resize, crop = loaded.recipe, loaded.recipe.get("resize"), loaded.recipe.get("crop")
    config = {"input_size": (3, *loaded.size), "mean": loaded.mean, "std": loaded.std}
    config |= {k: words[k] for k in ("interpolation", "crop_pct") if k in words}
    if isinstance(resize, int) and crop:  # torchvision and transformers say what is resized, then cropped
        config["crop_pct"] = min(crop) / resize
    kept = before if before is not None else {"model": asked.name, "arguments": {}, "library": loaded.source}
    origin = {k: kept[k] for k in ("model", "arguments", "library", "classes") if k in kept}
    return loaded.model, config, loaded.classes, origin


def _heads(named: str | Sequence[str] | None) -> list[str]:
    """The classifiers of a model, as timm's description names them."""
    return [named or "head"] if isinstance(named, str | None) else list(named)


def _fill(model: Any, weights: Weights, source: str, new_head: bool) -> None:
    """Load the weights; with `new_head` the classifier keeps what it began with."""
    if new_head:
        heads = _heads(model.default_cfg.get("classifier"))
        own = {k: v for k, v in model.state_dict().items() if any(k.startswith(f"{head}.") for head in heads)}
        weights = {k: v for k, v in match_names(weights, model).items() if k not in own} | own
    fit(model, weights, source)


def _with_modules(model: nn.Module, recipe: Recipe) -> nn.Module:
    asked = recipe.modules
    if asked.tap is None and asked.cb is None:
        return model
    from steadygaze import modules

    made: dict[str, Any] = {}
    for name, kind in (("tap", "TAP"), ("cb", "CB")):
        options = getattr(asked, name)
        if options is not None:
            try:
                made[name] = getattr(modules, kind)(
                    **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
                )
            except TypeError as error:
                known = [f.name for f in fields(getattr(modules, kind))]
                raise UnknownName(f"option of modules.{name}", _named(error), known) from error
    there = {name for name, kind in (("tap", modules.TokenPool), ("cb", modules.ContextBroadcast))
             if any(isinstance(m, kind) for m in modules.inserted(model).values())}  # fmt: skip
    for name in there & set(made):  # the weights that it begins with have brought it
        wanted, got = (
            _specs(m, name) for m in (modules.insert(modules.remove(model), **{name: made[name]}), model)
        )
        if wanted != got:
            raise BadInput(
                f"modules.{name}: the weights have it already, and differently: expected {sorted(got.items())}, "
                f"got {sorted(wanted.items())}. Leave modules.{name} out to go on with theirs."
            )
    new = {name: spec for name, spec in made.items() if name not in there}
    return modules.insert(model, **new) if new else model


def _specs(model: nn.Module, name: str) -> dict[str, str]:
    """Where a model has TAP or CB, and in which form."""
    from steadygaze import modules
    from steadygaze.modules.base import describe

    return {
        path: describe(m.spec)
        for path, m in modules.inserted(model).items()
        if path.rpartition(".")[2].startswith(name)
    }


def _named(error: TypeError) -> str:
    """The argument that a call did not know."""
    text = str(error)
    return text.split("'")[1] if "'" in text else text


def _try(model: nn.Module, size: tuple[int, int]) -> None:
    """Whether the model takes pictures of a size that is not its own."""
    try:
        with torch.no_grad():
            copy.deepcopy(model).eval()(torch.zeros(1, 3, *size))
    except (
        AssertionError,
        RuntimeError,
        ValueError,
    ) as error:  # timm, torch and transformers each say it in their way
        raise BadInput(
            f"data.size: the model does not take pictures of {size[0]}x{size[1]} ({error}). Leave it out."
        ) from error


def _outputs(model: nn.Module, config: dict[str, Any]) -> int:
    known = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    if known:
        return int(known)
    was = model.training
    with torch.no_grad():
        out = model.eval()(torch.zeros(1, *config["input_size"]))
    model.train(was)
    return (out if isinstance(out, torch.Tensor) else out.logits).shape[-1]
