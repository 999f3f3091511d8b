"""How a weights file of `steadygaze train` describes its model, read from its metadata and checked.

The file may be untrusted: every value has a type and a range, and the arguments of the model's
constructor are plain values whose sizes fit the tensors of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from steadygaze.errors import BadCheckpoint
from steadygaze.loading.checkpoint import MAX_CLASSES, Weights
from steadygaze.loading.timm_models import constructor_arguments, is_timm_name

METADATA_KEY = "steadygaze"
MAX_SIDE = 4096  # of a model's images, and of arguments such as patch_size
MAX_FLOAT = 1024.0
REPEATS = ("depth", "layer", "block", "stage")  # in names of arguments that repeat parts of a model

Description = dict[str, Any]
Text = Annotated[str, Field(max_length=1000)]
Scalar = bool | int | FiniteFloat | Text | None
Row = Annotated[list[Scalar], Field(max_length=64)]
Value = Scalar | Row | Annotated[list[Row], Field(max_length=64)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Channel = Annotated[FiniteFloat, Field(ge=-1000, le=1000)]
Deviation = Annotated[FiniteFloat, Field(gt=0, le=1000)]


class _Schema(BaseModel):
    """Keys that other versions add are kept."""

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
    """The description, if it is JSON with the expected keys, types and ranges; otherwise `BadCheckpoint`."""
    try:
        _Schema.model_validate_json(text)
        description: Description = json.loads(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "JSON"
        raise BadCheckpoint(
            f"{origin}: its description of the model cannot be used: {key}: {first['msg'][:200]}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{origin}: its description of the model is not JSON") from error
    return {"arguments": {}} | description


def check_arguments(description: Description, weights: Weights, origin: str) -> None:
    """`BadCheckpoint` unless timm's constructor takes the arguments and the file is large enough for them."""
    name, arguments = description["model"], description["arguments"]
    if not arguments or not is_timm_name(name):
        return
    unknown = sorted(set(arguments) - constructor_arguments(name))
    if unknown:
        raise BadCheckpoint(f"{origin}: {name} takes no argument {', '.join(unknown[:5])}")
    for key, value in _numbers(arguments):
        limit = _limit(key, value, weights)
        if abs(value) > limit:
            raise BadCheckpoint(
                f"{origin}: expected {key} of at most {limit:g} for the tensors of this file, got {value}"
            )


def _limit(key: str, value: float, weights: Weights) -> float:
    if isinstance(value, float):
        return MAX_FLOAT
    if "size" in key:
        return MAX_SIDE
    if any(word in key for word in REPEATS):
        return len(weights)
    return max(
        (max(tensor.shape) for tensor in weights.values() if tensor.dim() and tensor.numel()), default=1
    )


def _numbers(arguments: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of the arguments, also inside of lists, with the name of its argument."""
    for key, value in arguments.items():
        rest = [value]
        while rest:
            item = rest.pop()
            if isinstance(item, list):
                rest.extend(item)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                yield key, item
