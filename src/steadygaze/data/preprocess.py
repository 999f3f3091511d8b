"""From an image to the tensor that a model takes, in the words of the library that the model comes from.

| description (`config`) | geometry |
| --- | --- |
| timm: input_size, crop_pct, crop_mode, interpolation | timm's own evaluation transform |
| resize, crop, interpolation | resize (one number: shorter side; two: height and width), then center crop |

Both end in the same normalization: (pixels / 255 - mean) / std, channel by channel. Whatever needs images,
masks or uint8 pixels (explain, verify, stress, train, the page) takes geometry and normalization from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from steadygaze.data.decoding import check_bounds, first_line
from steadygaze.data.images import SOURCE_KEY
from steadygaze.errors import ImageError, InputError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
QWEN_SIDE = 448  # pixels of a side, where images may have any size

Geometry = Callable[[Image.Image], Image.Image]


def undo_normalization(
    images: Float[Tensor, "*b c h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "*b c h w"]:
    """images * std + mean in float32, channel by channel: pixels in 0..1, neither rounded nor clipped."""
    means, stds = (
        torch.tensor(list(values), dtype=torch.float32, device=images.device).view(-1, 1, 1)
        for values in (mean, std)
    )
    return images.detach().to(torch.float32) * stds + means


@dataclass(frozen=True)
class Preprocess:
    """Resize, center crop and normalization of one model.

    Attributes:
        config: How the model's library describes them (see the table above); it is written into records.

    Examples:
        >>> preprocess = Preprocess.resize_and_crop(size=(4, 4), resize=6, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> white = Image.new("RGB", (20, 10), "white")
        >>> tensor = preprocess(white)
        >>> tensor.shape, tensor.max().item(), preprocess.pixels(white, crop=False).shape
        (torch.Size([3, 4, 4]), 1.0, (6, 12, 3))
    """

    config: Mapping[str, Any]

    # -- built from the libraries' own descriptions ----------------------------------------------------

    @classmethod
    def from_timm(cls, config: Mapping[str, Any]) -> Preprocess:
        """Make it from what `timm.data.resolve_data_config` gives."""
        return cls(dict(config))

    @classmethod
    def from_timm_model(cls, model: Any) -> Preprocess:
        """Make it from the `pretrained_cfg` of a model of timm, and the image size that it was built for."""
        from timm.data import resolve_data_config

        config = resolve_data_config(model.pretrained_cfg, model=model)
        built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
        return cls.from_timm({**config, "input_size": (3, *built_for)} if built_for else config)

    @classmethod
    def from_transformers(cls, processor: Any) -> Preprocess:
        """Make it from an image processor of transformers.

        SigLIP 2's (NaFlex), Qwen's, Idefics' and YOLOS' keep the aspect ratio within a number of pixels; here
        they resize to a square, so that images can be stacked.
        """
        size = dict(getattr(processor, "size", None) or {})
        if not size and hasattr(processor, "max_num_patches"):
            side = int(processor.max_num_patches**0.5) * int(processor.patch_size)
            size = {"height": side, "width": side}
        if hasattr(processor, "merge_size"):  # Qwen: any size of whole cells, within a number of pixels
            cell = int(processor.patch_size) * int(processor.merge_size)
            side = min(QWEN_SIDE, int(size.get("longest_edge", QWEN_SIDE**2) ** 0.5)) // cell * cell
            size = {"height": side, "width": side}
        elif "longest_edge" in size:  # Idefics: one tile; detectors: the shorter side, nothing is cropped
            side = size.get("shortest_edge") or size["longest_edge"]
            size = {"height": side, "width": side}
        crop_size = getattr(processor, "crop_size", None) or {}
        crop_pct = getattr(processor, "crop_pct", None)
        crop = [crop_size["height"], crop_size["width"]] if crop_size else []
        crops = bool(getattr(processor, "do_center_crop", False) and crop)
        resize: int | list[int]
        if "shortest_edge" not in size:
            resize, crop = [size["height"], size["width"]], crop if crops else []
        elif crop_pct:  # resize to size / crop_pct, then crop to size
            resize, crop = int(size["shortest_edge"] / crop_pct), [size["shortest_edge"]] * 2
        else:
            resize, crop = size["shortest_edge"], crop if crops else [size["shortest_edge"]] * 2
        normalizes = getattr(processor, "do_normalize", True)
        return cls(
            {
                "resize": resize,
                "crop": crop,
                "interpolation": Image.Resampling(int(processor.resample)).name.lower(),
                "mean": list(processor.image_mean) if normalizes else [0.0] * 3,
                "std": list(processor.image_std) if normalizes else [1.0] * 3,
            }
        )

    @classmethod
    def from_torchvision(cls, preset: Any) -> Preprocess:
        """Make it from the transforms of a torchvision weights entry.

        Those for segmentation keep the aspect ratio; here they resize to a square, so that images can be
        stacked.
        """
        side = preset.resize_size[0]
        crop_size = getattr(preset, "crop_size", None)
        return cls(
            {
                "resize": side if crop_size else [side, side],
                "crop": [crop_size[0], crop_size[0]] if crop_size else [],
                "interpolation": preset.interpolation.value,
                "mean": preset.mean,
                "std": preset.std,
            }
        )

    @classmethod
    def resize_and_crop(
        cls,
        size: tuple[int, int],
        *,
        resize: int | tuple[int, int] | None = None,
        interpolation: str = "bicubic",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> Preprocess:
        """Resize, then crop the center to `size` (height, width).

        Args:
            resize: One number, the shorter side (by default that of `size`), or height and width.
        """
        return cls(
            {
                "resize": min(size)
                if resize is None
                else resize
                if isinstance(resize, int)
                else list(resize),
                "crop": list(size),
                "interpolation": interpolation,
                "mean": list(mean),
                "std": list(std),
            }
        )

    def override(
        self,
        *,
        size: tuple[int, int] | None = None,
        crop_pct: float | None = None,
        interpolation: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Preprocess:
        """The same with other values, as timm's center crop: resize to size / crop_pct, then crop."""
        return Preprocess.from_timm(
            {
                "input_size": (3, *(size or self.size)),
                "interpolation": interpolation or self.interpolation,
                "mean": tuple(mean or self.mean),
                "std": tuple(std or self.std),
                "crop_pct": crop_pct or self.crop_pct,
                "crop_mode": "center",
            }
        )

    # -- its description ---------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the tensors."""
        if self._timm:
            height, width = self.config["input_size"][-2:]
        else:
            height, width = self.config["crop"] or self.config["resize"]
        return int(height), int(width)

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(self.config["mean"])

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(self.config["std"])

    @property
    def interpolation(self) -> str:
        """ "nearest", "bilinear" or "bicubic"."""
        return str(self.config.get("interpolation") or "bicubic")

    @property
    def crop_pct(self) -> float:
        """Fraction of the resized image's shorter side that the center crop keeps."""
        resize, crop = self.config.get("resize"), self.config.get("crop")
        if isinstance(resize, int) and crop:
            return float(min(crop) / resize)
        return float(self.config.get("crop_pct") or 1.0)

    def describe(self) -> dict[str, str]:
        """Describe it for run.json ("preprocessing"): every value as text, keys in alphabetical order."""
        return {key: str(value) for key, value in sorted(self.config.items())}

    # -- images ----------------------------------------------------------------------------------------

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 h w"]:
        """An RGB image as the model takes it: float32, normalized."""
        pixels = torch.from_numpy(self.pixels(image).copy())
        return self.normalize(pixels.permute(2, 0, 1).contiguous())

    def pixels(self, image: Image.Image, *, crop: bool = True) -> UInt8[np.ndarray, "h w 3"]:
        """The same before normalization: uint8. With `crop=False`, also before the center crop."""
        return np.asarray(apply_geometry(self._geometry if crop else self._uncropped, image))

    def mask(self, mask: Image.Image, *, padding: int = 0) -> UInt8[Tensor, "h w"]:
        """A mask or label map (mode L) with the geometry of the image, by nearest neighbor.

        Args:
            padding: Value where the geometry adds a margin (timm's crop_mode "border").
        """
        from torchvision.transforms import InterpolationMode

        steps = self._steps()
        for step in steps:
            if hasattr(step, "interpolation"):
                step.interpolation = InterpolationMode.NEAREST
            if hasattr(step, "fill"):
                step.fill = padding
        return torch.from_numpy(np.array(apply_geometry(compose(steps), mask), dtype=np.uint8))

    def normalize(self, pixels: UInt8[Tensor, "*b 3 h w"]) -> Float[Tensor, "*b 3 h w"]:
        """uint8 to what the model takes: float32, (pixels / 255 - mean) / std."""
        mean, std = self._statistics(pixels)
        return pixels.to(torch.float32).div(255).sub(mean).div(std)

    def undo(self, images: Float[Tensor, "*b 3 h w"]) -> UInt8[Tensor, "*b 3 h w"]:
        """The inverse of `normalize`, rounded to uint8 and clipped to [0, 255]."""
        self._statistics(images)  # checks the number of channels
        unit = undo_normalization(images, self.mean, self.std).clamp(0, 1)
        return (unit * 255).round().to(torch.uint8)

    def to_image(self, image: Float[Tensor, "3 h w"]) -> Image.Image:
        """What the model sees: a preprocessed image with the normalization undone, as PIL image."""
        return Image.fromarray(self.undo(image).permute(1, 2, 0).cpu().numpy())

    # -- below: how ------------------------------------------------------------------------------------

    @property
    def _timm(self) -> bool:
        return "resize" not in self.config

    @cached_property
    def _geometry(self) -> Geometry:
        return compose(self._steps())

    @cached_property
    def _uncropped(self) -> Geometry:
        return compose([step for step in self._steps() if not type(step).__name__.startswith("CenterCrop")])

    def _steps(self) -> list[Any]:
        """New transforms that resize and crop."""
        from torchvision.transforms import CenterCrop, InterpolationMode, Resize

        if not self._timm:
            crop = self.config["crop"]
            steps = [Resize(self.config["resize"], InterpolationMode(self.interpolation))]
            return [*steps, CenterCrop(crop)] if crop else steps
        from timm.data import create_transform

        steps = create_transform(**self.config, is_training=False).transforms
        return [step for step in steps if not type(step).__name__.endswith(("ToTensor", "Normalize"))]

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if like.dim() < 3 or like.shape[-3] != len(self.mean):
            raise InputError(
                f"expected images (..., {len(self.mean)}, H, W), got a tensor of shape {tuple(like.shape)}"
            )
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return mean, std


def compose(steps: Sequence[Any]) -> Geometry:
    from torchvision.transforms import Compose

    geometry: Geometry = Compose(steps)
    return geometry


def apply_geometry(geometry: Geometry, image: Image.Image) -> Image.Image:
    """The image resized and cropped. Whatever fails is a `ImageError`, so that one image never ends a run."""
    name = str(image.info.get(SOURCE_KEY, "image in memory"))
    check_bounds(*image.size, name=name)
    try:
        return geometry(image)
    except Exception as error:  # of PIL, torchvision and timm, among them MemoryError
        size = f"{image.width:,} x {image.height:,}"
        raise ImageError(f"{name}: cannot be preprocessed, size {size} ({first_line(error)})") from error
