"""A model with what is needed to feed it and to name its classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError
from steadygaze.notebook import facts
from steadygaze.target import Task, class_index_of

SHOWN_CLASSES = 3  # names in a summary


@dataclass(frozen=True)
class ModelOptions:
    """How a model is built from its name; declared once, for every library.

    Attributes:
        weights: Tensors to be loaded, with the modules (TAP, CB) that they name; None: the published ones.
        origin: The file of the weights, for errors.
        num_classes: Width of the classifier; by default that of the weights, or the model's own.
        pretrained: Without `weights`, load the published ones; False keeps the random initialization.
        arguments: Arguments of timm's constructor, such as depth=6.
        new_head: Keep the classifier at its random initialization and load all other weights.
        trust_remote_code: Execute code that a transformers folder or repository contains.
        fallback: Preprocessing of a transformers folder that has no image processor.
    """

    weights: dict[str, Tensor] | None = None
    origin: str = ""
    num_classes: int | None = None
    pretrained: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    new_head: bool = False
    trust_remote_code: bool = False
    fallback: Preprocess | None = None


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """The result of `load_model`, accepted wherever a model is.

    Attributes:
        model: The module.
        name: Name that it was loaded with, or the name of its class.
        preprocess: RGB image -> (3, H, W), normalized.
        class_names: Names of the classes; None where they are not known.
        weights_hash: First 16 hex digits of the SHA-256 of all weights.
        source: Library of the module: "timm", "torchvision", "transformers", "open_clip", "embedded", ...
        checkpoint: File that the weights were read from, if one was given.
        task: "classification", "multilabel" or "regression"; None: as in the model's view, see `adapt`.
        tokenizer: Tokenizer of a model that compares images with text (CLIP) or answers questions (ViLT); for
            one that generates text, its processor of images and text.
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
        """What a summary shows: never the path of a file, which may be private."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        height, width = self.size
        names = self.class_names or ()
        some = ", ".join(names[:SHOWN_CLASSES]) + (", ..." if len(names) > SHOWN_CLASSES else "")
        return {
            "model": f"{type(self.model).__name__}{f' from {self.source}' if self.source else ''}",
            "parameters": f"{parameters / 1e6:.2f} million parameters",
            "input": f"images of {height} x {width}",
            "preprocessing": f"mean {_numbers(self.mean)}, std {_numbers(self.std)}" if self.mean else "",
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
        """Mean of the normalization, one value for each channel; () where it is not known."""
        return tuple(self.preprocess.config.get("mean", ()))

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the normalization, one value for each channel; () where it is not known."""
        return tuple(self.preprocess.config.get("std", ()))

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of a preprocessed image."""
        return self.preprocess.size

    def to_image(self, image: Tensor) -> Image.Image:
        """What the model sees: a preprocessed image (3, H, W) with the normalization undone."""
        return self.preprocess.to_image(image)

    def class_index(self, name: str) -> int:
        """The class with this name or number.

        Names are compared without case, first as a whole, then by each part between commas.
        """
        if self.class_names is None and not name.isdecimal():
            raise InputError(
                f"expected a class number, got {name!r}: the classes of {self.name} have no names"
            )
        return class_index_of(name, self.class_names or (), self.name)


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values)
