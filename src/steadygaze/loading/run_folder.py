"""Models that `steadygaze train` wrote. The weights file describes how to build the model again: its name,
arguments, modules, classes and preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import BadCheckpoint, BadInput
from steadygaze.loading.build import build_model
from steadygaze.loading.checkpoint import Weights, fit
from steadygaze.loading.description import METADATA_KEY, Description, check_arguments, read_description
from steadygaze.loading.loaded import BuiltModel
from steadygaze.loading.timm_models import build_timm_model, check_model_size
from steadygaze.modules import segmenter

__all__ = [
    "METADATA_KEY",
    "WEIGHTS",
    "Description",
    "described_preprocess",
    "read_description",
    "rebuild",
    "run_weights",
]
WEIGHTS = "model.safetensors"
BACKBONE_PREFIX = "backbone."  # of the names of the vision transformer inside a segmenter


def run_weights(name: str) -> Path | None:
    """The weights file of a folder that `steadygaze train` wrote; None if the name is no such folder."""
    folder = Path(name)
    if not (folder / "train.json").is_file():
        return None
    if not (folder / WEIGHTS).is_file():
        raise BadCheckpoint(
            f"{folder} is a training run that has not written {WEIGHTS} yet: let it finish an epoch"
        )
    return folder / WEIGHTS


def rebuild(
    description: Description,
    weights: Weights,
    origin: str,
    num_classes: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> BuiltModel:
    """The trained model. segments: number of classes of a segmenter, built around its vision transformer."""
    count, segments = description["num_classes"], description.get("segments")
    if num_classes not in (None, count):
        raise BadInput(f"num_classes: {origin} was trained with {count} classes, got {num_classes}")
    library = description.get("library", "timm")
    inner = weights
    if segments is not None:
        inner = {
            key.removeprefix(BACKBONE_PREFIX): value
            for key, value in weights.items()
            if key.startswith(BACKBONE_PREFIX)
        }
    if library == "timm":
        check_arguments(description, inner, origin)
        check_model_size(description["model"], count, description["arguments"], inner, origin)
        built = build_timm_model(
            description["model"], inner, origin, count, arguments=description["arguments"]
        )
    else:
        built = build_model(
            description["model"],
            inner,
            origin=origin,
            num_classes=count,
            trust_remote_code=trust_remote_code,
        )
    model = built.model
    _check_image_size(model, description["size"], origin)
    class_names = description["classes"]
    if class_names is None and segments is None:
        class_names = built.class_names
    if segments is not None:
        model = segmenter(model, segments, description.get("decoder", "linear"))
        fit(model, weights, origin)
    return BuiltModel(
        model, described_preprocess(description), None if class_names is None else tuple(class_names), library
    )


def _check_image_size(model: nn.Module, size: Sequence[int], origin: str) -> None:
    """`BadCheckpoint` if the described images are not those that a model of one size takes."""
    embedding = getattr(model, "patch_embed", None)
    own = getattr(embedding, "img_size", None)
    if own and getattr(embedding, "strict_img_size", False) and tuple(own) != tuple(size):
        raise BadCheckpoint(
            f"{origin}: its description states images of {tuple(size)}, but its model takes {tuple(own)}"
        )


def described_preprocess(description: Description) -> Preprocess:
    """The preprocessing that a model was trained with: timm's centre crop, whatever the library."""
    return Preprocess.from_timm(
        {
            "input_size": (3, *description["size"]),
            "interpolation": description["interpolation"],
            "mean": tuple(description["mean"]),
            "std": tuple(description["std"]),
            "crop_pct": description["crop"],
            "crop_mode": "center",
        }
    )
