"""manifest.json: what made a folder of attribution maps, for `Attribution.save` and `steadygaze explain`.

| key      | value                                                                                      |
| methods  | [{name, score}]: each method, and the quantity that it explained                           |
| grid     | [rows, columns] of the maps                                                                |
| images   | one entry per image: name, predictions, targets, overlays by method, and its file if known |
| versions | of the packages that made the maps                                                         |

`steadygaze explain` adds the model, its preprocessing, and what could not be explained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from steadygaze.files import write_atomic
from steadygaze.target import class_probabilities

PREDICTIONS = 3  # most probable classes that are listed for each image
PACKAGES = ("steadygaze", "torch", "torchvision", "timm", "transformers", "numpy", "pillow")


def write_manifest(
    folder: str | Path,
    *,
    methods: Mapping[str, str],
    grid: tuple[int, int],
    images: Sequence[Mapping[str, Any]],
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> Path:
    """Write manifest.json into `folder` and return its path.

    methods: the explained quantity by method name
    images: one `image_entry` for each image
    before, after: further entries, ahead of `methods` and behind `images`
    """
    content = {
        **(before or {}),
        "methods": [{"name": name, "score": score} for name, score in methods.items()],
        "grid": list(grid),
        "images": list(images),
        **(after or {}),
        "versions": versions(),
    }
    return write_atomic(Path(folder) / "manifest.json", json.dumps(content, indent=2) + "\n")


def image_entry(
    name: str,
    logits: Float[Tensor, " c"],
    target: Tensor | None,
    overlays: Mapping[str, Sequence[str]],
    *,
    class_names: Sequence[str] | None = None,
    file: str | Path | None = None,
) -> dict[str, Any]:
    """The manifest's entry of one image.

    target: the explained class, or several; None for a callable target
    overlays: names of the overlay files by method
    """
    probabilities = class_probabilities(logits.detach().cpu().double())

    def describe(index: int) -> dict[str, Any]:
        label = class_names[index] if class_names else None
        return {"class": index, "name": label, "probability": round(float(probabilities[index]), 6)}

    best = probabilities.topk(min(PREDICTIONS, len(probabilities))).indices.tolist()
    targets = [] if target is None else target.reshape(-1).tolist()
    return {
        "name": name,
        **({} if file is None else {"file": str(file)}),
        "predictions": [describe(index) for index in best],
        "targets": [describe(index) for index in targets],
        "overlays": {method: list(files) for method, files in overlays.items()},
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that made a result."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
