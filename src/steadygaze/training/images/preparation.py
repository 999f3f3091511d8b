"""The training and test images of a run: selected, checked, with masks from files or from TokenCut."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.loading.load import load_model
from steadygaze.progress import OnProgress
from steadygaze.training.images.dataset import TrainingImages
from steadygaze.training.images.selection import check_masks, select_images
from steadygaze.training.model import RecipeModel
from steadygaze.training.recipe import Recipe
from steadygaze.training.tokencut.masks import tokencut_masks

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
    masks = recipe.data.masks if part == "train" else recipe.data.test_masks
    if recipe.task == "segmentation":
        return _with_label_maps(recipe, built, part, masks, on_progress)
    if not recipe.losses_with_masks:
        labelled = select_images(recipe.data, part, built.classes, None)
        labelled = replace(labelled, decode=None)  # index.csv may list masks that no loss needs
        return TrainingImages(labelled, built.preprocess, recipe.augment, recipe.seed), []
    if masks == "tokencut":
        labelled = select_images(recipe.data, part, built.classes, None)
        images = TrainingImages(labelled, built.preprocess, recipe.augment, recipe.seed)
        images.generated_masks = _generate_masks(
            recipe, built, images, device, on_progress, trust_remote_code=trust_remote_code
        )
        return images, _mask_notes(recipe, images.generated_masks)
    labelled = select_images(recipe.data, part, built.classes, masks)
    notes = []
    if part == "train" and labelled.decode is None:
        losses = ", ".join(recipe.losses_with_masks)
        raise BadInput(f"data.masks: expected masks for {losses}, found none in {masks}")
    if labelled.without:
        notes.append(f"data.{part}: {labelled.without} images without a mask are left out")
    check_masks(labelled, on_progress)
    return TrainingImages(labelled, built.preprocess, recipe.augment, recipe.seed), notes


def _with_label_maps(
    recipe: Recipe, built: RecipeModel, part: str, masks: str | None, on_progress: OnProgress
) -> tuple[TrainingImages, list[str]]:
    labelled = select_images(recipe.data, part, None, masks)
    images = TrainingImages(labelled, built.preprocess, recipe.augment, recipe.seed)
    trained = built.description["segments"]
    if images.segmentation_classes != trained:
        raise BadInput(
            f"data.{part}: expected masks of the {trained} classes that are trained, "
            f"got {images.segmentation_classes}"
        )
    check_masks(labelled, on_progress)
    if not labelled.without:
        return images, []
    return images, [f"data.{part}: {labelled.without} images without a mask are left out"]


def _generate_masks(
    recipe: Recipe,
    built: RecipeModel,
    images: TrainingImages,
    device: Any,
    on_progress: OnProgress,
    *,
    trust_remote_code: bool,
) -> dict[str, Tensor]:
    """TokenCut masks from the keys of the model that the recipe names, or of this one before training."""
    data, model, preprocess = recipe.data, built.model, built.preprocess
    if data.cut_by:
        loaded = load_model(
            data.cut_by, data.cut_checkpoint, device=device, trust_remote_code=trust_remote_code
        )
        model = loaded.model
        preprocess = preprocess.override(size=loaded.size, mean=loaded.mean, std=loaded.std)
    return tokencut_masks(
        model,
        images.items,
        preprocess,
        refined=data.cut_edges == "bilateral",
        centred=data.cut_centred,
        on_progress=on_progress,
    )


def _mask_notes(recipe: Recipe, masks: dict[str, Tensor]) -> list[str]:
    covered = statistics.median(float(mask.bool().double().mean()) for mask in masks.values())
    if covered >= SMALL_MASK:
        return []
    advice = "Use another model, data.cut_by." if recipe.data.cut_centred else "Try data.cut_centred = true."
    return [
        f"TokenCut's masks cover {100 * covered:.1f} % of an image (median): "
        f"they may miss the object. {advice}"
    ]
