"""A model with what is needed to feed it and to name its classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.notebook import facts
from steadygaze.target import Task

SHOWN_CLASSES = 3  # names in a summary


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """What `build_model` gives: a module, its preprocessing and the names of its classes.

    class_names: None where they are not known
    source: the library that the module comes from ("timm", "torchvision", "transformers", "embedded")
    tokenizer: of a model that compares images with text
    """

    model: nn.Module
    preprocess: Preprocess
    class_names: tuple[str, ...] | None
    source: str
    tokenizer: Any = None


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """The result of `load_model`, accepted wherever a model is.

    preprocess: RGB image -> (3, H, W), normalized; see `data.preprocess.Preprocess`
    class_names: None where they are not known
    weights_hash: see `checkpoint.weights_hash`
    source: the library that the module comes from
    checkpoint: the file that the weights were read from, if one was given
    tokenizer: of a model that compares images with text (CLIP) or answers questions (ViLT); of one that
        generates text, its processor of images and text
    task: "classification", "multilabel" or "regression"; None: as in the model's view, see `adapt`
    """

    model: nn.Module
    name: str
    preprocess: Preprocess
    class_names: tuple[str, ...] | None = None
    weights_hash: str = ""
    source: str = ""
    checkpoint: str | None = None
    task: Task | None = None
    tokenizer: Any = None

    def __repr__(self) -> str:
        facts = ", ".join(text for name, text in self._facts().items() if text and name != "preprocessing")
        return f"LoadedModel({self.name}: {facts})"

    def _repr_html_(self) -> str:
        return facts(self.name, self._facts())

    def _facts(self) -> dict[str, str]:
        """What a summary says: never the path of a file, which is nobody else's business."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        height, width = self.size
        names = self.class_names or ()
        some = ", ".join(names[:SHOWN_CLASSES]) + (", ..." if len(names) > SHOWN_CLASSES else "")
        return {
            "model": f"{type(self.model).__name__}{f' from {self.source}' if self.source else ''}",
            "parameters": f"{parameters / 1e6:.2f} million parameters",
            "input": f"images of {height} x {width}",
            "preprocessing": f"mean {_numbers(self.mean)}, std {_numbers(self.std)}",
            "classes": f"{len(names)} classes ({some})" if names else "",
            "task": self.task or "",
            "weights": f"weights {self.weights_hash[:12]}" if self.weights_hash else "",
            "checkpoint": Path(self.checkpoint).name if self.checkpoint else "",
        }

    @property
    def identity(self) -> dict[str, str]:
        """What a row records about the model: its name, and the hash of its weights."""
        return {"model": self.name, "weights": self.weights_hash}

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the normalization, one value for each channel."""
        return self.preprocess.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the normalization, one value for each channel."""
        return self.preprocess.std

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of a preprocessed image."""
        return self.preprocess.size

    def to_image(self, image: Tensor) -> Image.Image:
        """What the model sees: a preprocessed image (3, H, W) with the normalization undone."""
        return self.preprocess.to_image(image)

    def class_index(self, name: str) -> int:
        """The class with this name or number. Names are compared without case, first as a whole, then by each
        part between commas."""
        if name.isdecimal():
            return int(name)
        if self.class_names is None:
            raise InputError(
                f"expected a class number, got {name!r}: the classes of {self.name} have no names"
            )
        wanted = name.strip().lower()
        splits: tuple[Callable[[str], list[str]], ...] = (lambda text: [text], lambda text: text.split(","))
        for split in splits:
            matches = [
                index
                for index, class_name in enumerate(self.class_names)
                if wanted in [part.strip() for part in split(class_name.lower())]
            ]
            if len(matches) > 1:
                listing = ", ".join(f"{index} ({self.class_names[index]})" for index in matches)
                raise InputError(
                    f"{name!r} is the name of {len(matches)} classes of {self.name}: {listing}. "
                    "Give the number of one."
                )
            if matches:
                return matches[0]
        known = {part.strip() for class_name in self.class_names for part in class_name.split(",")}
        raise UnknownNameError("class", name, known)

    # -- names of the first version --------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Deprecated: use `class_names`."""
        _deprecated("LoadedModel.classes", "LoadedModel.class_names")
        return self.class_names

    @property
    def recipe(self) -> dict[str, Any]:
        """Deprecated: use `preprocess.config`."""
        _deprecated("LoadedModel.recipe", "LoadedModel.preprocess.config")
        return dict(self.preprocess.config)

    def picture(self, image: Tensor) -> Image.Image:
        """Deprecated: use `to_image`."""
        _deprecated("LoadedModel.picture", "LoadedModel.to_image")
        return self.to_image(image)


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
