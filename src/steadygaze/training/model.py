"""From a recipe to the model that is trained: created or loaded, with its modules and the format of its images."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
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
from steadygaze.training.images.input_format import InputFormat
from steadygaze.training.images.selection import class_folders
from steadygaze.training.random_state import seeded
from steadygaze.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """The model of a recipe, before training.

    description: what recreates the model: name, arguments, modules, classes, preprocessing
    """

    model: nn.Module
    classes: Classes
    input_format: InputFormat
    description: dict[str, Any]

    @property
    def num_classes(self) -> int:
        return int(self.description["num_classes"])

    @property
    def metadata(self) -> dict[str, str]:
        """What the file of the weights says about them."""
        return {"steadygaze": json.dumps(self.description, ensure_ascii=False)}


@dataclass(frozen=True, eq=False)
class _InitialModel:
    """config: preprocessing in timm's words; class_names: that the weights bring; origin: recreates the model."""

    model: nn.Module
    config: dict[str, Any]
    class_names: tuple[str, ...] | None
    origin: dict[str, Any]


def build_model(recipe: Recipe) -> BuiltModel:
    """Create or load the model; new weights depend on the recipe's seed alone."""
    maps = find_maps(recipe.data.train, recipe.data.masks, "train") if recipe.task == "segmentation" else None
    folders = class_folders(recipe.data.train) if maps is None else None
    with seeded(recipe.seed, 2):
        initial = _initial_model(recipe, folders)
        backbone = _insert_modules(_backbone(initial.model, recipe), recipe)
        model = backbone if maps is None else _segmenter(initial.model, backbone, maps)
    num_classes = _num_classes(backbone, initial.config)
    names = next((n for n in (initial.class_names, folders) if n is not None and len(n) == num_classes), None)
    input_format = InputFormat.of(initial.config, recipe.data)
    if recipe.data.size is not None and input_format.size != tuple(initial.config["input_size"][1:]):
        _check_accepts_size(model, input_format.size)
    side = max(input_format.size)
    if recipe.augment.crop == "resize" and recipe.augment.resize < side:
        raise BadInput(
            f"augment.resize: expected at least the size of the images, {side}, got {recipe.augment.resize}"
        )
    own_names = names is not None and names is not initial.class_names
    description = {
        "classes": list(names) if own_names and names is not None else None,
        **initial.origin,
        "num_classes": num_classes,
        "modules": recipe.modules.model_dump(),
        "mean": input_format.mean,
        "std": input_format.std,
        "size": input_format.size,
        "interpolation": input_format.interpolation,
        "crop": input_format.crop,
    }
    if maps is not None:
        map_names = None if maps.names is None else list(maps.names)
        description |= {"segments": maps.classes, "classes": map_names}
    return BuiltModel(model, Classes(names, num_classes), input_format, description)


# -- created or loaded ------------------------------------------------------------------------------------------------


def _initial_model(recipe: Recipe, folders: tuple[str, ...] | None) -> _InitialModel:
    options = recipe.model
    trained = None if options.checkpoint is None else told_by(options.checkpoint)
    same_model = trained is not None and trained["model"] == options.name
    from_run = same_model and trained is not None and options.arguments in ({}, trained["arguments"])
    if not _is_timm(options.name) or (from_run and not options.new_head):
        if options.new_head or (options.arguments and not from_run):
            raise _not_a_timm_model(options.name)
        return _loaded_model(recipe)
    if options.pretrained and options.checkpoint:
        raise BadInput("model.pretrained, model.checkpoint: expected one of them, got both")
    if options.pretrained and not options.arguments and not options.new_head:
        return _loaded_model(recipe)
    return _created_model(recipe, folders)


def _loaded_model(recipe: Recipe) -> _InitialModel:
    """A model from `load_model`, with the preprocessing it has there."""
    options = recipe.model
    loaded = load_model(options.name, options.checkpoint, num_classes=options.num_classes)
    config = {"input_size": (3, *loaded.size), "mean": loaded.mean, "std": loaded.std}
    config |= {key: loaded.recipe[key] for key in ("interpolation", "crop_pct") if key in loaded.recipe}
    resize, crop = loaded.recipe.get("resize"), loaded.recipe.get("crop")
    if isinstance(resize, int) and crop:  # torchvision and transformers resize, then crop
        config["crop_pct"] = min(crop) / resize
    earlier_run = None if loaded.checkpoint is None else told_by(loaded.checkpoint)
    if earlier_run is not None:
        keys = ("model", "arguments", "library", "classes")
        origin = {key: earlier_run[key] for key in keys if key in earlier_run}
    else:
        origin = {"model": options.name, "arguments": {}, "library": loaded.source}
    return _InitialModel(loaded.model, config, loaded.classes, origin)


def _created_model(recipe: Recipe, folders: tuple[str, ...] | None) -> _InitialModel:
    """A timm model with the recipe's arguments, and its weights if there are any."""
    import timm
    from timm.data import resolve_data_config

    options = recipe.model
    weights = None if options.checkpoint is None else read_weights(options.checkpoint)
    count = options.num_classes
    if count is None and (weights is None or options.new_head):
        count = None if folders is None else len(folders)
    elif count is None and weights is not None:
        count = head_width(weights, _head_names(timm.get_pretrained_cfg_value(options.name, "classifier")))
    try:
        width = {} if count is None else {"num_classes": count}
        model = timm.create_model(options.name, pretrained=options.pretrained, **width, **options.arguments)
    except (TypeError, AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"model.arguments: {options.name} cannot be created with {options.arguments} ({error})"
        ) from error
    except OSError as error:
        raise BadCheckpoint(
            f"the weights of {options.name} could not be downloaded ({error}). Give model.checkpoint, a file."
        ) from error
    if weights is not None:
        model = with_modules(model, weights)
        _load_weights(model, weights, options.checkpoint or "", options.new_head)
    has_weights = weights is not None or options.pretrained
    config = resolve_data_config(model.pretrained_cfg, model=model)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size:
        config |= {"input_size": (3, *size)}
    origin = {"model": options.name, "arguments": options.arguments}
    return _InitialModel(model, config, _imagenet_names(model) if has_weights else None, origin)


def _is_timm(name: str) -> bool:
    import timm

    with suppress(ImportError):
        import_module("steadygaze.models")  # registers RVT, FAN and others in timm
    return timm.is_model(name)


def _not_a_timm_model(name: str) -> BadInput:
    import timm

    near = get_close_matches(name, timm.list_models(), n=1, cutoff=0.5)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return BadInput(
        f"model.arguments, model.new_head: {name!r} is not a model of timm{guess}; only those can be created"
    )


def _imagenet_names(model: nn.Module) -> tuple[str, ...] | None:
    """Class names of a timm model that was trained on a subset of ImageNet."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i) for i in range(info.num_classes()))


def _head_names(classifier: str | Sequence[str] | None) -> list[str]:
    """The classifiers of a model, as timm's configuration names them."""
    return [classifier or "head"] if isinstance(classifier, str | None) else list(classifier)


def _load_weights(model: Any, weights: Weights, source: str, new_head: bool) -> None:
    """Load the weights; with `new_head` the classifier keeps its initial ones."""
    if new_head:
        prefixes = tuple(f"{head}." for head in _head_names(model.default_cfg.get("classifier")))
        own = {key: value for key, value in model.state_dict().items() if key.startswith(prefixes)}
        matched = match_names(weights, model)
        weights = {key: value for key, value in matched.items() if key not in own} | own
    fit(model, weights, source)


# -- segmenters and modules -------------------------------------------------------------------------------------------


def _backbone(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The vision transformer: that of a segmenter, or the model itself."""
    from steadygaze.modules import Segmenter

    if not isinstance(model, Segmenter):
        return model
    if recipe.task != "segmentation":
        raise BadInput(
            "model: its weights are of a segmenter. Use task = 'segmentation', or the weights of a classifier."
        )
    return model.backbone


def _segmenter(model: nn.Module, backbone: nn.Module, maps: Segmented) -> nn.Module:
    """A segmenter around the backbone; the one that the weights brought, if its classes are those of the masks."""
    from steadygaze.modules import Segmenter, segmenter

    if not isinstance(model, Segmenter):
        return segmenter(backbone, maps.classes)
    if model.classes != maps.classes:
        raise BadInput(
            f"model: its weights are of a segmenter of {model.classes} classes, but the masks have {maps.classes}"
        )
    model.backbone = backbone
    return model


def _insert_modules(model: nn.Module, recipe: Recipe) -> nn.Module:
    from steadygaze import modules

    specs: dict[str, Any] = {}
    if recipe.modules.tap is not None:
        specs["tap"] = _module_spec("tap", modules.TAP, recipe.modules.tap)
    if recipe.modules.cb is not None:
        specs["cb"] = _module_spec("cb", modules.CB, recipe.modules.cb)
    if not specs:
        return model
    classes = {"tap": modules.TokenPool, "cb": modules.ContextBroadcast}
    inserted = modules.inserted(model).values()
    present = {name for name in specs if any(isinstance(module, classes[name]) for module in inserted)}
    for name in present:  # the initial weights brought it
        plain = modules.remove(model)
        requested = _module_texts(modules.insert(plain, **{name: specs[name]}), name)
        existing = _module_texts(model, name)
        if requested != existing:
            raise BadInput(
                f"modules.{name}: the weights contain it already, with other options: expected "
                f"{sorted(existing.items())}, got {sorted(requested.items())}. "
                f"Leave modules.{name} out to keep theirs."
            )
    new = {name: spec for name, spec in specs.items() if name not in present}
    return modules.insert(model, **new) if new else model


def _module_spec(name: str, spec: Any, options: Mapping[str, Any]) -> Any:
    """TAP or CB with the recipe's options."""
    try:
        return spec(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
    except TypeError as error:
        quoted = str(error).split("'")
        unknown = quoted[1] if len(quoted) > 1 else str(error)
        raise UnknownName(f"option of modules.{name}", unknown, [f.name for f in fields(spec)]) from error


def _module_texts(model: nn.Module, name: str) -> dict[str, str]:
    """Where a model has TAP or CB, and with which options."""
    from steadygaze import modules
    from steadygaze.modules.base import told

    return {
        path: told(module.spec)
        for path, module in modules.inserted(model).items()
        if path.rpartition(".")[2].startswith(name)
    }


# -- what the model accepts and returns -------------------------------------------------------------------------------


def _check_accepts_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Whether the model runs on images of a size other than its own."""
    try:
        with torch.no_grad():
            copy.deepcopy(model).eval()(torch.zeros(1, 3, *size))
    except (AssertionError, RuntimeError, ValueError) as error:  # timm, torch and transformers differ here
        raise BadInput(
            f"data.size: the model does not accept images of {size[0]}x{size[1]} ({error}). Leave it out."
        ) from error


def _num_classes(model: nn.Module, config: Mapping[str, Any]) -> int:
    declared = getattr(model, "num_classes", None)
    declared = declared or getattr(getattr(model, "config", None), "num_labels", None)
    if declared:
        return int(declared)
    was_training = model.training
    with torch.no_grad():
        output = model.eval()(torch.zeros(1, *config["input_size"]))
    model.train(was_training)
    return (output if isinstance(output, torch.Tensor) else output.logits).shape[-1]
