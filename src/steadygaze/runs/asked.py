"""What a run over folders is asked for, by `verify` and by `stress` alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.loading.load import Loaded, load_model
from steadygaze.runs.loop import World
from steadygaze.vit.view import evaluation_mode


@dataclass(frozen=True)
class Asked:
    """The model, the data, where the rows go, and how much of it."""

    model: str
    data: Path | None
    out: Path
    _: KW_ONLY
    checkpoint: Path | None = None
    masks: Path | None = None
    limit: int | None = None
    seed: int = 0
    batch: int = 16
    num_classes: int | None = None
    device: str = "auto"
    command: str = ""

    @property
    def folder(self) -> Path:
        """The data's folder, if it is one."""
        if self.data is None or not self.data.is_dir():
            if self.data is None:
                raise BadInput(
                    "data: expected a folder of pictures, got none. Give --data FOLDER; only shifts and neighbours do without."
                )
            raise BadInput(
                f"data: expected a folder of pictures, got {self.data}: {'a file' if self.data.exists() else 'no such folder'}"
            )
        return self.data

    def load(self, place: World) -> Loaded:
        """The model, on its device: the one asked for, this process's own, or a GPU if there is one."""
        device: Any = self.device
        if device == "auto":
            device = place.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return load_model(self.model, self.checkpoint, num_classes=self.num_classes, device=device)

    def facts(self, loaded: Loaded) -> dict[str, Any]:
        """What defines the numbers of any run: the same again goes on with it."""
        return {
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "preprocessing": {k: str(v) for k, v in sorted(loaded.recipe.items())},
            "data": "" if self.data is None else self.data.resolve().name,
            "limit": self.limit,
        }

    def given(self) -> dict[str, Any]:
        """Where model and data are, so that a report can open them again."""
        paths = {"data": self.data, "masks": self.masks, "checkpoint": self.checkpoint}
        return {
            "model": self.model,
            "num_classes": self.num_classes,
            **{k: path and str(path) for k, path in paths.items()},
        }


def outputs(model: nn.Module, size: tuple[int, int]) -> int:
    """How many classes a classifier tells apart."""
    parameter = next(iter(model.parameters()), torch.zeros(0))
    with torch.no_grad(), evaluation_mode(model):
        output = model(torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype))
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = str(tuple(logits.shape)) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModel(
            f"{type(model).__name__}: expected a classifier that gives logits (B, classes), got {got}. "
            "A segmenter is stressed by the suite segmentation alone."
        )
    return logits.shape[1]


def digest(lines: Iterable[str]) -> str:
    """16 hex digits that tell one list of pictures from another."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def fingerprint(tensors: Iterable[Tensor | None]) -> str:
    """16 hex digits that tell one batch from another."""
    found = hashlib.sha256()
    for x in tensors:
        if x is not None:
            found.update(f"{x.dtype} {tuple(x.shape)}".encode())
            found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
