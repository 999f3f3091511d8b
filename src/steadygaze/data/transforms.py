"""A user's own preprocessing, such as a `Compose` of torchvision, as a `Preprocess`.

| what is needed | by | where it is read |
| --- | --- | --- |
| size | everything | the result for two blank images |
| mean and std | verify, stress, displayed images | the step `Normalize`; or mean= and std= of `load_model` |
| resize and crop | masks, cue-conflict images | the steps `Resize` and `CenterCrop` |
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from steadygaze.data.decoding import first_line
from steadygaze.data.preprocess import Geometry, Preprocess, apply_geometry, compose
from steadygaze.errors import InputError

Transform = Callable[[Image.Image], Tensor]

GEOMETRY = ("Resize", "ResizeKeepRatio", "CenterCrop", "CenterCropOrPad")
TO_TENSOR = (
    *("ToTensor", "MaybeToTensor", "PILToTensor", "MaybePILToTensor", "ToImage", "ToPureTensor"),
    *("ConvertImageDtype", "ToDtype", "ToNumpy", "RGB"),
)
PROBES = (80, 60), (60, 80)  # (width, height) of the blank images that show the size of the result


@dataclass(frozen=True)
class OwnPreprocess(Preprocess):
    """A callable from an RGB image of PIL to a tensor (3, H, W), called as it is.

    Attributes:
        transform: The callable.
    """

    transform: Transform

    @property
    def mean(self) -> tuple[float, ...]:
        return self._known("mean")

    @property
    def std(self) -> tuple[float, ...]:
        return self._known("std")

    def _known(self, name: str) -> tuple[float, ...]:
        if name not in self.config:
            raise InputError(
                "verify, stress and displayed images need the normalization of preprocess, which cannot be "
                "read from it: give load_model mean= and std= too, (0, 0, 0) and (1, 1, 1) if there is none",
                option=name,
            )
        return tuple(self.config[name])

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 h w"]:
        transformed: Any = apply_geometry(self.transform, image)  # type: ignore[arg-type]
        return torch.as_tensor(transformed)

    def pixels(self, image: Image.Image, *, crop: bool = True) -> UInt8[np.ndarray, "h w 3"]:
        if not crop:
            return np.asarray(apply_geometry(self._uncropped, image))
        return self.undo(self(image)).permute(1, 2, 0).numpy()

    def override(self, **values: Any) -> Preprocess:
        self._steps()  # in words, if they are not known
        return super().override(**values)

    @cached_property
    def _uncropped(self) -> Geometry:
        return compose([step for step in self._steps() if not type(step).__name__.startswith("CenterCrop")])

    def _steps(self) -> list[Any]:
        steps = geometry_steps(self.transform)
        if steps is None:
            raise InputError(
                "masks and images before the crop need the resize and crop of preprocess, which cannot be "
                "read from it: give a Compose of Resize, CenterCrop, ToTensor and Normalize"
            )
        return copy.deepcopy(steps)


def own_preprocess(
    transform: Any,
    size: tuple[int, int] | None = None,
    *,
    option: str = "preprocess",
    probes: Sequence[tuple[int, int]] = PROBES,
) -> Preprocess:
    """The preprocessing that a user gave: ours, an image processor of transformers, or any callable.

    Args:
        size: (height, width) of all images, for a callable that does not resize.
        option: The argument that it was given as, for errors.
        probes: (width, height) of the blank images that show the size of the result.

    Examples:
        >>> from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor
        >>> steps = Resize(10), CenterCrop(8), ToTensor(), Normalize((0.5,) * 3, (0.25,) * 3)
        >>> preprocess = own_preprocess(Compose(steps))
        >>> preprocess.size, preprocess.mean, preprocess.crop_pct
        ((8, 8), (0.5, 0.5, 0.5), 0.8)
    """
    if isinstance(transform, Preprocess):
        return transform
    if hasattr(transform, "image_mean") and hasattr(transform, "resample"):
        return Preprocess.from_transformers(transform)
    if not callable(transform):
        raise InputError(
            f"{option}: expected a callable from an image of PIL to a tensor (3, H, W), such as a Compose of "
            f"torchvision, got {type(transform).__name__}",
            option=option,
        )
    height, width = _result_size(transform, size, option, probes)
    config: dict[str, Any] = {"transform": _description(transform), "input_size": (3, height, width)}
    config |= _normalization(transform) | _geometry(transform, (height, width))
    return OwnPreprocess(config, transform)


def geometry_steps(transform: Any) -> list[Any] | None:
    """The steps of a `Compose` that resize and crop; None if there may be others."""
    steps = getattr(transform, "transforms", None)
    if steps is None or not all(_name(step) in (*GEOMETRY, *TO_TENSOR, "Normalize") for step in steps):
        return None
    return [step for step in steps if _name(step) in GEOMETRY]


def _name(step: Any) -> str:
    """The class of a step; of the functions that CLIP and open_clip have among them, "RGB"."""
    name = str(getattr(step, "__name__", type(step).__name__))
    return "RGB" if re.fullmatch(r"_?convert(_image)?_to_rgb", name) else name


def _normalization(transform: Any) -> dict[str, Any]:
    """Mean and std: those of the last `Normalize`; 0 and 1 if a `Compose` of known steps has none."""
    mean: Any = getattr(transform, "mean", None)  # of torchvision's weights
    std: Any = getattr(transform, "std", None)
    if mean is None or std is None:
        found = [step for step in getattr(transform, "transforms", ()) if _name(step) == "Normalize"]
        if len(found) == 1:
            mean, std = found[0].mean, found[0].std
        elif not found and geometry_steps(transform) is not None:
            mean, std = [0.0] * 3, [1.0] * 3
        else:
            return {}
    return {"mean": [float(value) for value in mean], "std": [float(value) for value in std]}


def _geometry(transform: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Resize, crop and interpolation as `Preprocess` describes them, as far as they can be read."""
    steps = {_name(step): step for step in geometry_steps(transform) or ()}
    resize = getattr(steps.get("Resize"), "size", None)
    if resize is None:
        return {}
    sides = [resize] if isinstance(resize, int) else list(resize)
    method = getattr(steps["Resize"], "interpolation", None)
    return {
        "resize": int(sides[0]) if len(sides) == 1 else [int(side) for side in sides],
        "crop": list(size),
        "interpolation": str(getattr(method, "value", method)),
    }


def _result_size(
    transform: Transform, size: tuple[int, int] | None, option: str, probes: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """(height, width) of the result, which is checked on blank images."""
    sizes = []
    for probe in probes if size is None else [size[::-1]]:
        try:
            result: Any = transform(Image.new("RGB", probe, (127, 127, 127)))
        except Exception as error:  # whatever a user's function raises
            raise InputError(
                f"{option} fails on an RGB image of PIL ({type(error).__name__}: {first_line(error)})",
                option=option,
            ) from error
        shape = tuple(getattr(result, "shape", ()))
        if (
            not isinstance(result, Tensor)
            or len(shape) != 3
            or shape[0] != 3
            or not result.is_floating_point()
        ):
            got = f"{result.dtype} {shape}" if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"{option}: expected a floating-point tensor (3, H, W) for an image of PIL, got {got}; "
                "end it with ToTensor and Normalize",
                option=option,
            )
        sizes.append((int(shape[1]), int(shape[2])))
    if len(set(sizes)) > 1:
        raise InputError(
            "preprocess gives tensors of different sizes for images of different sizes: add a Resize and a "
            "CenterCrop, or image_size= if all images have the same size",
            option="preprocess",
        )
    if size is not None and sizes[0] != size:
        raise InputError(
            f"preprocess gives images of {sizes[0]}, got image_size {size}: change the Resize and CenterCrop "
            "of preprocess instead",
            option="image_size",
        )
    return sizes[0]


def _description(transform: Any) -> str:
    """The same text in every process, for records: no addresses, and a function by its name."""
    if not hasattr(transform, "transforms") and hasattr(transform, "__qualname__"):
        return f"{transform.__module__}.{transform.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+|\s+", lambda match: " " if match[0].isspace() else "", repr(transform))
