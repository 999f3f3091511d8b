"""Names of the first version, until `stress` uses `runs.request`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygaze.data.content import names_hash as digest
from steadygaze.data.content import tensor_hash
from steadygaze.errors import BadInput
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.runs.processes import World
from steadygaze.runs.request import number_of_classes as outputs

__all__ = ["Asked", "digest", "fingerprint", "outputs"]


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
                    "data: expected a folder of pictures, got none. Only shifts and neighbours do without."
                )
            kind = "a file" if self.data.exists() else "no such folder"
            raise BadInput(f"data: expected a folder of pictures, got {self.data}: {kind}")
        return self.data

    def load(self, place: World) -> LoadedModel:
        device: Any = self.device
        if device == "auto":
            device = place.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return load_model(self.model, self.checkpoint, num_classes=self.num_classes, device=device)

    def facts(self, loaded: LoadedModel) -> dict[str, Any]:
        return {
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "preprocessing": loaded.preprocess.describe(),
            "data": "" if self.data is None else self.data.resolve().name,
            "limit": self.limit,
        }

    def given(self) -> dict[str, Any]:
        paths = {"data": self.data, "masks": self.masks, "checkpoint": self.checkpoint}
        return {
            "model": self.model,
            "num_classes": self.num_classes,
            **{k: path and str(path) for k, path in paths.items()},
        }


def fingerprint(tensors: Iterable[Tensor | None]) -> str:
    return tensor_hash(*tensors)
