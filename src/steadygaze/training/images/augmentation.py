"""Augmentation of one image with its mask: crops, flips, colours, timm's RandAugment and random erasing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import BadInput
from steadygaze.training.recipe import Augment

ImageOperation = Callable[[Image.Image], Image.Image]
MAX_OPERATIONS = 100  # of RandAugment, for one image
RANDOM_INTERPOLATIONS = ("bilinear", "bicubic")


class Augmentation:
    """The operations a recipe asks for. Geometry applies to image and mask alike, given the same random
    state.

    mask_padding: value of padded pixels of a mask
    """

    def __init__(self, options: Augment, preprocess: Preprocess, mask_padding: int = 0) -> None:
        self.options, self.preprocess, self.mask_padding = options, preprocess, mask_padding
        assert self._colour_operations is not None  # options that timm refuses are reported before training

    def random_crop(self, image: Image.Image, *, is_mask: bool = False) -> Image.Image:
        """A random crop and flip, at the size of the model."""
        from torchvision.transforms import RandomCrop, RandomResizedCrop
        from torchvision.transforms import functional as F

        o, interpolation = self.options, self._interpolation(is_mask)
        height, width = self.preprocess.size
        if o.crop == "resized":
            box = RandomResizedCrop.get_params(image, o.scale, o.ratio)
            image = F.resized_crop(image, *box, [height, width], interpolation)
        elif o.crop == "none":
            image = self._centre_crop(image, is_mask)
        else:
            if o.crop == "resize":
                image = F.resize(image, [o.resize, o.resize], interpolation)
            else:
                if image.size != (width, height):
                    image = F.resize(image, [height, width], interpolation)
                image = F.pad(image, [o.pad] * 4, fill=self.mask_padding if is_mask else 0)
            image = F.crop(image, *RandomCrop.get_params(image, (height, width)))
        return F.hflip(image) if torch.rand(()).item() < o.flip else image

    def recolour(self, image: Image.Image) -> Image.Image:
        """Colour jitter and RandAugment; the latter moves pixels too, and is never used with masks."""
        for operation in self._colour_operations:
            image = operation(image)
        return image

    def to_tensor(self, image: Image.Image) -> Tensor:
        """An image of the model's size as the model takes it, (3, H, W), normalised."""
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
        return self.preprocess.normalise(pixels.permute(2, 0, 1).contiguous())

    def erase(self, image: Tensor) -> Tensor:
        """Random erasing, of the normalised image."""
        return self._erase(image) if self.options.erase else image

    def _centre_crop(self, image: Image.Image, is_mask: bool) -> Image.Image:
        """The crop of testing."""
        if is_mask:
            return Image.fromarray(self.preprocess.mask(image).numpy())
        return Image.fromarray(self.preprocess.pixels(image))

    @cached_property
    def _colour_operations(self) -> list[ImageOperation]:
        from torchvision.transforms import ColorJitter

        o = self.options
        operations: list[ImageOperation] = []
        if o.color_jitter:
            operations.append(ColorJitter(o.color_jitter, o.color_jitter, o.color_jitter))
        if o.rand_augment:
            side = min(self.preprocess.size)
            operations.append(rand_augment(o.rand_augment, self.preprocess.mean, side, o.interpolation))
        return operations

    @cached_property
    def _erase(self) -> Any:
        from timm.data.random_erasing import RandomErasing

        return RandomErasing(self.options.erase, mode="pixel", max_count=1, device="cpu")

    def _interpolation(self, is_mask: bool) -> Any:
        from torchvision.transforms import InterpolationMode

        if is_mask:
            return InterpolationMode.NEAREST
        name = self.options.interpolation or self.preprocess.interpolation
        return InterpolationMode(random.choice(RANDOM_INTERPOLATIONS) if name == "random" else name)


def mask_to_tensor(mask: Image.Image) -> Tensor:
    """The codes of a mask or label map, (H, W) uint8."""
    return torch.from_numpy(np.array(mask, dtype=np.uint8))


def rand_augment(config: str, mean: Sequence[float], side: int, interpolation: str | None = None) -> Any:
    """timm's RandAugment, on every version of Pillow.

    config: in timm's notation; mean: colour of pixels moved in from outside; side: of the image, in pixels
    interpolation: None or "random": bilinear or bicubic, drawn for each operation
    """
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import str_to_pil_interp

    fill = tuple(min(255, round(255 * m)) for m in mean)
    options: dict[str, Any] = {"translate_const": int(side * 0.45), "img_mean": fill}
    if interpolation not in (None, "random"):
        options["interpolation"] = str_to_pil_interp(interpolation)
    try:
        transform = rand_augment_transform(config, options)
        _check_layers(transform)
    except Exception as error:  # timm's parser of the notation raises many kinds
        raise BadInput(
            f"augment.rand_augment: expected timm's notation, such as rand-m9-mstd0.5-inc1, got {config!r}"
        ) from error
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = posterize
    return transform


def _check_layers(transform: Any) -> None:
    if not 0 <= transform.num_layers <= MAX_OPERATIONS:
        raise ValueError(f"{transform.num_layers} operations")


def posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Keep the highest bits of every colour. 0 bits, which timm uses and new versions of Pillow refuse, give
    black."""
    from timm.data.auto_augment import posterize as timm_posterize

    return timm_posterize(image, bits_to_keep) if bits_to_keep > 0 else Image.new(image.mode, image.size)
