"""Size and normalisation of the images a model is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadygaze.training.recipe import Data


@dataclass(frozen=True)
class InputFormat:
    """size: (height, width) in pixels; crop: share of the shorter side that the centre crop of testing keeps."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float

    @classmethod
    def of(cls, model_config: Mapping[str, Any], data: Data) -> InputFormat:
        """The model's own (in timm's words), changed by the recipe."""
        height, width = model_config["input_size"][1:]
        return cls(
            size=(data.size, data.size) if data.size else (height, width),
            mean=tuple(data.mean or model_config["mean"]),
            std=tuple(data.std or model_config["std"]),
            interpolation=data.interpolation or model_config.get("interpolation") or "bicubic",
            crop=data.crop or model_config.get("crop_pct") or 1.0,
        )
