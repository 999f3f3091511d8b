"""Models that `steadygaze train` wrote.

The metadata of the weights file describes how to build the model again: its name, arguments, modules, classes
and preprocessing. The file may be untrusted: every value has a type and a range, and the arguments of the
model's constructor are plain values whose sizes fit the tensors of the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import CheckpointError, InputError
from steadygaze.loading.build import build_model
from steadygaze.loading.checkpoint import MAX_CLASSES, Weights, fit, hub
from steadygaze.loading.loaded import LoadedModel, ModelOptions
from steadygaze.loading.options import MAX_SIDE, number_limit, numbers_in
from steadygaze.loading.timm import build_timm_model, check_model_size, constructor_arguments, is_timm_name
from steadygaze.modules import segmenter
from steadygaze.untrusted import inside

METADATA_KEY = "steadygaze"

Description = dict[str, Any]
Text = Annotated[str, Field(max_length=1000)]
Scalar = bool | int | FiniteFloat | Text | None
Row = Annotated[list[Scalar], Field(max_length=64)]
Value = Scalar | Row | Annotated[list[Row], Field(max_length=64)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Channel = Annotated[FiniteFloat, Field(ge=-1000, le=1000)]
Deviation = Annotated[FiniteFloat, Field(gt=0, le=1000)]


class _Schema(BaseModel):
    """Base of the schemas of a description; keys that other versions add are kept."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=1000)]
    arguments: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], Value] = Field(default_factory=dict)
    num_classes: Annotated[int, Field(ge=1, le=MAX_CLASSES)]
    classes: Annotated[list[Text], Field(max_length=MAX_CLASSES)] | None
    library: Annotated[str, Field(max_length=100)] = "timm"
    segments: Annotated[int, Field(ge=2, le=255)] | None = None
    decoder: Literal["linear", "segformer"] = "linear"
    size: tuple[Side, Side]
    mean: tuple[Channel, Channel, Channel]
    std: tuple[Deviation, Deviation, Deviation]
    interpolation: Annotated[str, Field(pattern="^(nearest|bilinear|bicubic|lanczos|box|hamming)$")]
    crop: Annotated[FiniteFloat, Field(ge=0.05, le=4)]

    @model_validator(mode="after")
    def _check_classes(self) -> _Schema:
        expected = self.num_classes if self.segments is None else self.segments
        if self.classes is not None and len(self.classes) != expected:
            raise ValueError(f"classes: expected {expected} names, got {len(self.classes)}")
        if max(self.size) / self.crop > 2 * MAX_SIDE:
            raise ValueError(f"crop: images would be resized to {max(self.size) / self.crop:,.0f} pixels")
        return self


def read_description(checkpoint: str | Path) -> Description | None:
    """How a .safetensors file describes its model; None if it is not one that `steadygaze train` wrote."""
    path = Path(checkpoint)
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(METADATA_KEY)
    except (OSError, SafetensorError):
        return None  # `read_weights` reports what is wrong with it
    return None if text is None else parse_description(text, str(path))


def parse_description(text: str, origin: str) -> Description:
    """The description, if it is JSON with the expected keys, types and ranges; else `CheckpointError`."""
    try:
        _Schema.model_validate_json(text)
        description: Description = json.loads(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "JSON"
        raise CheckpointError(
            f"{origin}: its description of the model cannot be used: {key}: {first['msg'][:200]}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin}: its description of the model is not JSON") from error
    return {"arguments": {}} | description


def check_arguments(description: Description, weights: Weights, origin: str) -> None:
    """Raise `CheckpointError` unless timm's constructor takes the arguments and the file can hold them."""
    name, arguments = description["model"], description["arguments"]
    if not arguments or not is_timm_name(name):
        return
    unknown = sorted(set(arguments) - constructor_arguments(name))
    if unknown:
        raise CheckpointError(f"{origin}: {name} takes no argument {', '.join(unknown[:5])}")
    shapes = [tensor.shape for tensor in weights.values() if tensor.dim() and tensor.numel()]
    widest = max(map(max, shapes), default=1)
    for key, value in numbers_in(arguments):
        limit = number_limit(key, value, repeats=len(weights), width=widest)
        if abs(value) > limit:
            raise CheckpointError(
                f"{origin}: expected {key} of at most {limit:g} for the tensors of this file, got {value}"
            )


WEIGHTS = "model.safetensors"
BACKBONE_PREFIX = "backbone."  # of the names of the vision transformer inside a segmenter


def run_weights(name: str) -> Path | None:
    """The weights file of a folder that `steadygaze train` wrote; None if the name is not such a folder."""
    folder = Path(name)
    if not (folder / "train.json").is_file():
        return None
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} is a training run that has not written {WEIGHTS} yet: let it finish an epoch"
        )
    return inside(folder, WEIGHTS)


def rebuild(description: Description, options: ModelOptions) -> LoadedModel:
    """The trained model with `options.weights`; a segmenter is built around its vision transformer."""
    name, count, segments = description["model"], description["num_classes"], description.get("segments")
    weights, origin = options.weights, options.origin
    assert weights is not None
    if options.num_classes not in (None, count):
        raise InputError(f"num_classes: {origin} was trained with {count} classes, got {options.num_classes}")
    library = description.get("library", "timm")
    inner = weights
    if segments is not None:
        inner = {
            key.removeprefix(BACKBONE_PREFIX): value
            for key, value in weights.items()
            if key.startswith(BACKBONE_PREFIX)
        }
    options = replace(options, weights=inner, num_classes=count)
    with hub(origin, local=True):  # the description may name any repository: only the local cache is searched
        if library == "timm":
            check_arguments(description, inner, origin)
            check_model_size(name, count, description["arguments"], inner, origin)
            built = build_timm_model(name, replace(options, arguments=description["arguments"]))
        else:
            built = build_model(name, replace(options, fallback=None))
    model = built.model
    _check_image_size(model, description["size"], origin)
    class_names = description["classes"]
    if class_names is None and segments is None:
        class_names = built.class_names
    if segments is not None:
        model = segmenter(model, segments, description.get("decoder", "linear"))
        fit(model, weights, origin)
    class_names = None if class_names is None else tuple(class_names)
    return LoadedModel(model, name, described_preprocess(description), class_names, source=library)


def _check_image_size(model: nn.Module, size: Sequence[int], origin: str) -> None:
    """Raise `CheckpointError` if the described images are not those that a model of one size takes."""
    embedding = getattr(model, "patch_embed", None)
    own = getattr(embedding, "img_size", None)
    if own and getattr(embedding, "strict_img_size", False) and tuple(own) != tuple(size):
        raise CheckpointError(
            f"{origin}: its description states images of {tuple(size)}, but its model takes {tuple(own)}"
        )


def described_preprocess(description: Description) -> Preprocess:
    """The preprocessing that a model was trained with: timm's center crop, whatever the library."""
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
