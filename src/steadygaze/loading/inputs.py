"""From a model and images as people have them to what a model runs on: `prepare_inputs`.

| images | model | preprocessing |
| --- | --- | --- |
| a tensor (B, 3, H, W) | any | none: it is preprocessed already |
| a path, a folder, a PIL image, a uint8 array, a list of these | any, with `transform=` | `transform` |
| the same | a name, a pipeline, the result of `load_model` | its own |
| the same | a module | the one it declares: `pretrained_cfg` (timm), image processor (transformers) |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from steadygaze.data.images import IMAGE_KINDS, any_image, images_in, unique_names
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.transforms import own_preprocess
from steadygaze.errors import InputError, MemoryUseWarning, UnsupportedModelError
from steadygaze.loading.load import declared_preprocess, from_pipeline, is_pipeline, load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.vit.adapt import unwrapped
from steadygaze.vit.clean_forward import check_plain
from steadygaze.vit.image_range import display_pixels
from steadygaze.vit.view import ViT

KINDS = f"{IMAGE_KINDS}, a list or a folder of them, or a preprocessed floating-point tensor (B, 3, H, W)"
PIXELS_AT_ONCE = 16 * 224 * 224  # of images that run through a model together
LARGE = 2**30  # bytes: what takes more is announced
OneImage = str | PathLike[str] | Image.Image | np.ndarray
Images = OneImage | Sequence[OneImage] | Tensor


@dataclass(frozen=True)
class Inputs:
    """A model and preprocessed images, with what is needed to display them.

    Attributes:
        model: What was given, or the `LoadedModel` of a name or pipeline: anything that `adapt` takes.
        images: (B, 3, H, W), preprocessed. A tensor is what was given; other images are on the model's
            device.
        shown: What the model sees, after resize and crop, one image each. Where the normalization is not
            known, the values are stretched to 0..255. None if a tensor has neither one nor three channels.
        names: A name for each image, all different: the stem of its file, or "0", "1", ...
    """

    model: Any
    images: Tensor
    shown: tuple[Image.Image, ...] | None
    names: tuple[str, ...]


def prepare_inputs(
    model: Any, images: Any, transform: Callable[[Image.Image], Tensor] | None = None
) -> Inputs:
    """Load the model if it is a name, read the images and preprocess them.

    Args:
        model: A name or folder for `load_model`, a module, the result of `load_model`, `ask` or `zero_shot`,
            a `ViT`, or an object of `transformers.pipeline`.
        images: A path, a folder, a PIL image, a numpy array (H, W, 3) or (B, H, W, 3) of uint8, a list of
            these; or a preprocessed tensor (B, 3, H, W), which is passed on unchanged.
        transform: A callable from an RGB image of PIL to a tensor (3, H, W), in place of the model's own
            preprocessing. Needed for a module that declares none.

    Raises:
        ImageError: If an image file cannot be read.
        InputError: If the images are of another kind, or how they are preprocessed is not known.

    Examples:
        >>> inputs = prepare_inputs("embedded", np.zeros((48, 64, 3), np.uint8))
        >>> inputs.images.shape, inputs.shown[0].size, inputs.names
        (torch.Size([1, 3, 32, 32]), (32, 32), ('0',))
    """
    if isinstance(images, Tensor):
        if transform is not None:
            raise InputError(
                "transform: expected images that it transforms, such as PIL images, got a tensor, which is "
                "preprocessed already. Leave transform out, or give the images themselves",
                option="transform",
            )
        return _given_tensor(resolved(model), images)
    sources = _sources(images)
    original = any_image(sources[0])  # before a model is loaded for nothing
    model = resolved(model)
    preprocess = _preprocess(model, transform, original)
    tensors = [preprocess(original)]
    bytes_each = tensors[0].numel() * (tensors[0].element_size() + 1)  # and 8 bits to be shown
    what = f"preprocessing {len(sources)} images"
    announce(len(sources) * bytes_each, what, "Use fewer images at a time.")
    tensors += [preprocess(any_image(source)) for source in sources[1:]]  # one original in memory at a time
    if len({tensor.shape for tensor in tensors}) > 1:
        sizes = " and ".join(sorted({f"{tensor.shape[-2]} x {tensor.shape[-1]}" for tensor in tensors}))
        raise InputError(
            f"transform: expected tensors of one size for all images, got {sizes}. Add a Resize and a "
            "CenterCrop",
            option="transform",
        )
    batch = torch.stack(tensors)
    _check_question(_module(model), batch)
    parameter = next(_module(model).parameters(), batch)
    names = unique_names(_name(source, number) for number, source in enumerate(sources))
    shown = _shown(preprocess, model, batch)
    return Inputs(model, batch.to(parameter.device), shown, tuple(names))


def announce(needed: int, what: str, do: str) -> bool:
    """Issue a `MemoryUseWarning` if `needed` bytes are more than 1 GiB; returns whether they are.

    Args:
        what: What takes the memory.
        do: What to do about it.
    """
    if needed <= LARGE:
        return False
    size = f"{needed / 2**30:.1f} GiB of memory"
    warnings.warn(f"{what} takes {size}. {do}", MemoryUseWarning, stacklevel=3)
    return True


def at_once(images: Float[Tensor, "b c h w"]) -> int:
    """Number of images that run through a model together, so that memory does not grow with their number.

    Examples:
        >>> at_once(torch.empty(100, 3, 224, 224)), at_once(torch.empty(100, 3, 518, 518))
        (16, 2)
    """
    return max(1, PIXELS_AT_ONCE // (images.shape[-2] * images.shape[-1]))


def _given_tensor(model: Any, images: Tensor) -> Inputs:
    """A tensor as it is; what is wrong with it is found by the view, which knows the shape to expect."""
    check_plain(images)
    batch = images.shape[0] if images.dim() == 4 else 0
    usable = batch > 0 and images.is_floating_point() and not images.is_meta
    pixels = display_pixels(model, images) if usable else None
    return Inputs(model, images, _as_images(pixels), tuple(str(number) for number in range(batch)))


def resolved(model: Any) -> Any:
    """The model, loaded if it is a name, and with its preprocessing if it is a pipeline."""
    if isinstance(model, (str, PathLike)):
        # what a path leads to may change between two calls
        return load_model(str(model)) if Path(model).exists() else _by_name(str(model))
    return from_pipeline(model) if is_pipeline(model) else model


@lru_cache(maxsize=1)
def _by_name(name: str) -> LoadedModel:
    """The model of the last name: a loop over images loads it once."""
    return load_model(name)


def _module(model: Any) -> nn.Module:
    module: nn.Module = model.model if isinstance(model, ViT) else unwrapped(model)
    if not isinstance(module, nn.Module):
        raise UnsupportedModelError(
            "model: expected a name, a module, the result of load_model or a pipeline of transformers, got "
            f"{type(model).__name__}"
        )
    return module


def _preprocess(model: Any, transform: Any, example: Image.Image) -> Preprocess:
    """The transform given, the preprocessing of a loaded model, or the one that a module declares."""
    if transform is not None:
        return own_preprocess(transform, option="transform", probes=(example.size,))
    module = _module(model)
    if isinstance(own := getattr(model, "preprocess", None), Preprocess):
        return own
    declared = declared_preprocess(module)
    inner = getattr(module, "model", None)
    if declared is None and _is_question(module) and isinstance(inner, nn.Module):
        declared = declared_preprocess(inner)
    if declared is None:
        raise InputError(
            f"transform: how {type(module).__name__} preprocesses images is not known, since it has neither "
            "a pretrained_cfg (timm) nor an image processor beside its weights (transformers). Give "
            "transform=, such as a Compose of torchvision, or preprocessed images (B, 3, H, W)",
            option="transform",
        )
    return declared


def _check_question(module: nn.Module, images: Tensor) -> None:
    """`InputError` if a question was made with an image of another size, by its model's own processor."""
    prepared = getattr(module, "prepared", None)
    if isinstance(prepared, Tensor) and prepared.shape[-2:] != images.shape[-2:]:
        height, width = prepared.shape[-2:]
        raise InputError(
            f"images: expected images of {height} x {width}, as the processor of this model prepared the one "
            f"that the prompt is about, got {images.shape[-2]} x {images.shape[-1]}. Give that image: the "
            "question has it as `prepared` (of a loaded model: asked.model.prepared)"
        )


def _is_question(module: nn.Module) -> bool:
    """Whether the module is one of ours around a model, which gets the images as they are."""
    return type(module).__module__.startswith("steadygaze.")


def _sources(images: Any) -> list[Any]:
    """One source for each image: a path, a PIL image or an array."""
    if isinstance(images, (str, PathLike)):
        return list(images_in(Path(images))) if Path(images).is_dir() else [images]
    if isinstance(images, Image.Image):
        return [images]
    if isinstance(images, np.ndarray):
        return list(images) if images.ndim == 4 and images.dtype == np.uint8 else [images]
    if not isinstance(images, (list, tuple)):
        raise InputError(f"images: expected {KINDS}, got {type(images).__name__}")
    if not images:
        raise InputError(f"images: expected at least one image, got an empty {type(images).__name__}")
    sources: list[Any] = []
    for image in images:
        if isinstance(image, Tensor):
            raise InputError(
                "images: expected preprocessed tensors as one tensor (B, 3, H, W), got a list with a tensor "
                f"of shape {tuple(image.shape)}. Use torch.stack, or torch.cat where they have a batch axis"
            )
        if not isinstance(image, (str, PathLike, Image.Image, np.ndarray)):
            raise InputError(f"images: expected {KINDS}, got a list with {type(image).__name__}")
        sources += _sources(image)
    return sources


def _name(source: Any, number: int) -> Sequence[str]:
    """Folders and stem of a file, also of one that PIL has opened; else its number."""
    file = source if isinstance(source, (str, PathLike)) else getattr(source, "filename", "")
    path = Path(file) if isinstance(file, (str, PathLike)) else Path()
    return (*path.parts[:-1], path.stem) if path.stem else (str(number),)


def _shown(preprocess: Preprocess, model: Any, images: Tensor) -> tuple[Image.Image, ...] | None:
    if "mean" in preprocess.config:
        return tuple(preprocess.to_image(image) for image in images)
    return _as_images(display_pixels(model, images))


def _as_images(pixels: Tensor | None) -> tuple[Image.Image, ...] | None:
    if pixels is None:
        return None
    return tuple(Image.fromarray(image.permute(1, 2, 0).cpu().numpy()) for image in pixels)
