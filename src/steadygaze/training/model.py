"""From a recipe to the model that is trained, and to its training and test images.

Modules are inserted, the format of images is set; images are selected and checked, with masks from files or
from TokenCut.

A module (TAP, CB) whose `start` the recipe leaves open begins as the identity in trained weights, which it
then does not harm, and as in its paper in new weights.
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze import modules
from steadygaze.data.folders import ClassLookup
from steadygaze.data.label_maps import SegmentationImages, find_label_maps
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError
from steadygaze.loading.build import build_model
from steadygaze.loading.checkpoint import read_weights
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import ModelOptions
from steadygaze.loading.options import check_new_model
from steadygaze.loading.run_folder import read_description
from steadygaze.loading.timm import check_model_size, is_timm_name
from steadygaze.modules.base import Start, describe
from steadygaze.modules.segmenter import Decoder, Segmenter, segmenter
from steadygaze.progress import OnProgress
from steadygaze.training.images import TrainingImages, check_masks, class_folders, select_images
from steadygaze.training.recipe import Modules, Recipe, module_spec
from steadygaze.training.run_files import seeded
from steadygaze.training.tokencut import tokencut_masks

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RecipeModel:
    """The model of a recipe, before training.

    Attributes:
        description: What recreates the model: name, arguments, modules, classes, preprocessing.
        module_start: `start` of new modules for which the recipe does not set it.
    """

    model: nn.Module
    classes: ClassLookup
    preprocess: Preprocess
    description: dict[str, Any]
    module_start: Start

    @property
    def num_classes(self) -> int:
        return int(self.description["num_classes"])

    @property
    def metadata(self) -> dict[str, str]:
        """What the file of the weights says about them."""
        return {"steadygaze": json.dumps(self.description, ensure_ascii=False)}


@dataclass(frozen=True, eq=False)
class _InitialModel:
    """A model as it is loaded or created, before modules are inserted.

    Attributes:
        class_names: Those that the weights bring.
        origin: The part of the description that states where the model is from.
        trained: Whether it has the weights of a checkpoint, or pretrained ones.
    """

    model: nn.Module
    preprocess: Preprocess
    class_names: tuple[str, ...] | None
    origin: dict[str, Any]
    trained: bool


def build_recipe_model(
    recipe: Recipe, *, trust_remote_code: bool = False, module_start: Start | None = None
) -> RecipeModel:
    """Create or load the model; new weights depend on the recipe's seed alone.

    Args:
        module_start: `start` of the new modules of a run that is resumed; by default "identity" in trained
            weights, "paper" in new ones.
    """
    data = recipe.data
    maps = find_label_maps(data.train, data.masks, "train") if recipe.task == "segmentation" else None
    folders = class_folders(data.train) if maps is None else None
    with seeded(recipe.seed, 2):
        initial = _initial_model(recipe, folders, trust_remote_code=trust_remote_code)
        start: Start = "identity" if initial.trained else "paper"
        reason = f"the model starts from {'trained' if initial.trained else 'new'} weights"
        if module_start is not None:
            start, reason = module_start, "that of the run in this folder"
        backbone = _backbone(initial.model, recipe)
        backbone, module_options = insert_modules(backbone, recipe.modules, start, reason)
        model: nn.Module = (
            backbone if maps is None else _segmenter(initial.model, backbone, maps, recipe.model.decoder)
        )
    num_classes = _num_classes(backbone, initial.preprocess.size)
    names = next((n for n in (initial.class_names, folders) if n is not None and len(n) == num_classes), None)
    preprocess = initial.preprocess.override(
        size=(data.size, data.size) if data.size else None,
        crop_pct=data.crop,
        interpolation=data.interpolation,
        mean=data.mean,
        std=data.std,
    )
    if preprocess.size != initial.preprocess.size:
        height, width = preprocess.size
        try:
            _run_once(copy.deepcopy(model), preprocess.size)
        except (AssertionError, RuntimeError, ValueError) as error:  # timm, torch and transformers differ
            raise InputError(
                f"data.size: the model does not accept images of {height}x{width} ({error}). Leave it out."
            ) from error
    side = max(preprocess.size)
    if recipe.augment.crop == "resize" and recipe.augment.resize < side:
        raise InputError(
            f"augment.resize: expected at least the size of the images, {side}, got {recipe.augment.resize}"
        )
    new_names = None if names is None or names is initial.class_names else list(names)
    description = {
        "classes": new_names,
        **initial.origin,
        "num_classes": num_classes,
        "modules": module_options,
        "mean": preprocess.mean,
        "std": preprocess.std,
        "size": preprocess.size,
        "interpolation": preprocess.interpolation,
        "crop": preprocess.crop_pct,
    }
    if maps is not None:
        map_names = None if maps.names is None else list(maps.names)
        assert isinstance(model, Segmenter)
        description |= {"segments": maps.classes, "classes": map_names, "decoder": model.decoder_name}
    return RecipeModel(model, ClassLookup(names, num_classes), preprocess, description, start)


def insert_modules(
    model: nn.Module, tables: Modules, default_start: Start, reason_for_default: str
) -> tuple[nn.Module, dict[str, dict[str, Any] | None]]:
    """(the model with the recipe's modules, their options with `start`).

    Modules that the weights brought are kept, and must have the recipe's options.
    """
    kinds = {"tap": modules.TokenPool, "cb": modules.ContextBroadcast}
    options = tables.model_dump()
    new = {}
    for name, table in options.items():
        if table is None:
            continue
        present = [m for m in modules.inserted(model).values() if isinstance(m, kinds[name])]
        if "start" in table:
            start, reason = table["start"], "set by the recipe"
        elif present:
            start, reason = present[0].spec.get("start", "paper"), "of the initial weights"
        elif table.get("init"):  # Λ of CB_S is not 0: the outputs change, whatever the weights
            start, reason = "paper", "modules.cb.init is set"
        else:
            start, reason = default_start, reason_for_default
        options[name] = {**table, "start": start}
        spec = module_spec(name, options[name])
        if not present:
            new[name] = spec
            log.info("modules.%s.start = %r: %s", name, start, reason)
            continue
        requested = _module_texts(modules.insert(modules.remove(model), **{name: spec}), name)
        existing = _module_texts(model, name)
        if requested != existing:
            raise InputError(
                f"modules.{name}: the weights contain it already, with other options: expected "
                f"{sorted(existing.items())}, got {sorted(requested.items())}. "
                f"Leave modules.{name} out to keep theirs."
            )
    return (modules.insert(model, **new) if new else model), options


def _module_texts(model: nn.Module, name: str) -> dict[str, str]:
    """Where a model has TAP or CB, and with which options."""
    return {
        path: describe(module.spec)
        for path, module in modules.inserted(model).items()
        if path.rpartition(".")[2].startswith(name)
    }


def _initial_model(
    recipe: Recipe, folders: tuple[str, ...] | None, *, trust_remote_code: bool
) -> _InitialModel:
    """The model that `load_model` gives, or a new one of timm."""
    o = recipe.model
    run = None if o.checkpoint is None else read_description(o.checkpoint)
    from_run = run is not None and run["model"] == o.name and o.arguments in ({}, run["arguments"])
    is_timm = is_timm_name(o.name)
    if is_timm and not from_run and o.pretrained and o.checkpoint:
        raise InputError("model.pretrained, model.checkpoint: expected one of them, got both")
    other_arguments = bool(o.arguments) and not from_run
    untrained = is_timm and not from_run and not o.pretrained
    if o.new_head or other_arguments or untrained:
        return _created_model(recipe, folders)
    return _loaded_model(recipe, trust_remote_code=trust_remote_code)


def _loaded_model(recipe: Recipe, *, trust_remote_code: bool) -> _InitialModel:
    o = recipe.model
    loaded = load_model(o.name, o.checkpoint, num_classes=o.num_classes, trust_remote_code=trust_remote_code)
    earlier_run = None if loaded.checkpoint is None else read_description(loaded.checkpoint)
    if earlier_run is not None:
        keys = ("model", "arguments", "library", "classes")
        origin = {key: earlier_run[key] for key in keys if key in earlier_run}
    else:
        origin = {"model": o.name, "arguments": {}, "library": loaded.source}
    return _InitialModel(loaded.model, loaded.preprocess, loaded.class_names, origin, trained=True)


def _created_model(recipe: Recipe, folders: tuple[str, ...] | None) -> _InitialModel:
    """A model with the recipe's arguments and checkpoint; a new classifier has the folders' classes."""
    o = recipe.model
    weights = None if o.checkpoint is None else read_weights(o.checkpoint)
    count = o.num_classes
    if count is None and folders is not None and (weights is None or o.new_head):
        count = len(folders)
    try:
        if o.arguments and is_timm_name(o.name):
            check_new_model(o.name, count, o.arguments)
            if weights is not None:
                check_model_size(o.name, count, o.arguments, weights, o.checkpoint or "")
        options = ModelOptions(
            weights=weights,
            origin=o.checkpoint or "",
            num_classes=count,
            pretrained=o.pretrained,
            arguments=o.arguments,
            new_head=o.new_head,
        )
        built = build_model(o.name, options)
    except InputError as error:
        raise InputError(f"model.{error}") from error
    if o.arguments:
        height, width = built.preprocess.size
        try:
            _run_once(built.model, (height, width))
        except Exception as error:  # of layers that were given odd values
            raise InputError(
                f"model.arguments: with {o.arguments} the model does not run on images of {height}x{width} "
                f"({type(error).__name__}: {error})"
            ) from error
    origin = {"model": o.name, "arguments": o.arguments}
    trained = weights is not None or o.pretrained or not is_timm_name(o.name)
    return _InitialModel(built.model, built.preprocess, built.class_names, origin, trained)


# -- segmenters ----------------------------------------------------------------------------------


def _backbone(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The vision transformer: that of a segmenter, or the model itself."""
    if not isinstance(model, Segmenter):
        return model
    if recipe.task != "segmentation":
        raise InputError(
            "model: its weights are of a segmenter. "
            "Use task = 'segmentation', or the weights of a classifier."
        )
    return model.backbone


def _segmenter(
    model: nn.Module, backbone: nn.Module, maps: SegmentationImages, decoder: Decoder | None
) -> Segmenter:
    """A segmenter around the backbone; that of the weights, if its classes are those of the masks."""
    if not isinstance(model, Segmenter):
        return segmenter(backbone, maps.classes, decoder or "linear")
    if model.classes != maps.classes:
        raise InputError(
            f"model: its weights are of a segmenter of {model.classes} classes, "
            f"but the masks have {maps.classes}"
        )
    if decoder not in (None, model.decoder_name):
        raise InputError(
            f"model.decoder: the weights have a {model.decoder_name} decoder, got {decoder!r}. Leave it out."
        )
    model.backbone = backbone
    return model


# -- what the model accepts and returns ------------------------------------------------------------


def _run_once(model: nn.Module, size: tuple[int, int]) -> Any:
    """The model's output for a blank image of this size."""
    was_training = model.training
    try:
        with torch.no_grad():
            return model.eval()(torch.zeros(1, 3, *size))
    finally:
        model.train(was_training)


def _num_classes(model: nn.Module, size: tuple[int, int]) -> int:
    declared = getattr(model, "num_classes", None)
    declared = declared or getattr(getattr(model, "config", None), "num_labels", None)
    if declared:
        return int(declared)
    output = _run_once(model, size)
    return (output if isinstance(output, Tensor) else output.logits).shape[-1]


SMALL_MASK = 0.05  # share of an image; masks that cover less may miss the object


def prepare_images(
    recipe: Recipe,
    built: RecipeModel,
    part: str,
    device: Any,
    on_progress: OnProgress,
    *,
    trust_remote_code: bool = False,
) -> tuple[TrainingImages, list[str]]:
    """The dataset of "train" or "test", and notes for the user."""
    data, needs_masks = recipe.data, bool(recipe.losses_with_masks)
    masks = data.masks if part == "train" else data.test_masks
    if recipe.task == "segmentation":
        labeled = select_images(data, part, None, masks)
    elif needs_masks and masks != "tokencut":
        labeled = select_images(data, part, built.classes, masks)
        if part == "train" and labeled.decode is None:
            losses = ", ".join(recipe.losses_with_masks)
            raise InputError(f"data.masks: expected masks for {losses}, found none in {masks}")
    else:
        labeled = select_images(data, part, built.classes, None)
        if not needs_masks:
            labeled = replace(labeled, decode=None)  # index.csv may list masks that no loss needs
    images = TrainingImages(labeled, built.preprocess, recipe.augment, recipe.seed)
    if recipe.task == "segmentation" and images.segmentation_classes != built.description["segments"]:
        raise InputError(
            f"data.{part}: expected masks of the {built.description['segments']} classes that are trained, "
            f"got {images.segmentation_classes}"
        )
    if recipe.task != "segmentation" and not needs_masks:
        return images, []
    if recipe.task == "segmentation" or masks != "tokencut":
        check_masks(labeled, on_progress)
        count = labeled.without
        return images, [f"data.{part}: {count} images without a mask are left out"] if count else []
    # TokenCut, from the keys of the model that the recipe names, or of this one before training
    model, preprocess = built.model, built.preprocess
    if data.cut_by:
        loaded = load_model(
            data.cut_by, data.cut_checkpoint, device=device, trust_remote_code=trust_remote_code
        )
        model = loaded.model
        preprocess = preprocess.override(size=loaded.size, mean=loaded.mean, std=loaded.std)
    images.generated_masks = tokencut_masks(
        model,
        images.items,
        preprocess,
        refined=data.cut_edges == "bilateral",
        centered=data.cut_centered,
        on_progress=on_progress,
    )
    shares = (float(mask.bool().double().mean()) for mask in images.generated_masks.values())
    covered = statistics.median(shares)
    if covered >= SMALL_MASK:
        return images, []
    advice = "Use another model, data.cut_by." if data.cut_centered else "Try data.cut_centered = true."
    note = f"TokenCut's masks cover {100 * covered:.1f} % of an image (median): they may miss the object."
    return images, [f"{note} {advice}"]
