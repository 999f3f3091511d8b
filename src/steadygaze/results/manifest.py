"""manifest.json: what made a folder of attribution maps, for `Attribution.save` and `steadygaze explain`.

| key      | value                                                                                      |
| methods  | [{name, score}]: each method, and the quantity that it explained                           |
| task     | classification, multilabel or regression; null for features                                |
| grid     | [rows, columns] of the maps                                                                |
| images   | one entry per image: name, predictions, targets, overlays by method, and its file if known |
|          | with `check`: removal curves and a sentence for each target, by method                     |
| versions | of the packages that made the maps                                                         |

`steadygaze explain` adds the model, its preprocessing, and what could not be explained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from steadygaze.files import write_atomic
from steadygaze.target import NOUNS, PRESENT, Outputs, Task, predictions
from steadygaze.untrusted import read_text

MANIFEST = "manifest.json"
PREDICTIONS = 3  # most probable classes that are listed for each image
PACKAGES = ("steadygaze", "torch", "torchvision", "timm", "transformers", "numpy", "pillow")


def write_manifest(
    folder: str | Path,
    *,
    name: str = MANIFEST,
    methods: Mapping[str, str],
    grid: tuple[int, int],
    images: Sequence[Mapping[str, Any]],
    task: Task | None = "classification",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> Path:
    """Write manifest.json into `folder` and return its path.

    Args:
        name: Name of the file.
        methods: The explained quantity by method name.
        images: One `image_entry` for each image.
        before: Further entries, ahead of `methods`.
        after: Further entries, behind `images`.
    """
    content = {
        **(before or {}),
        "methods": [{"name": name, "score": score} for name, score in methods.items()],
        "task": task,
        "grid": list(grid),
        "images": list(images),
        **(after or {}),
        "versions": versions(),
    }
    return write_atomic(Path(folder) / name, json.dumps(content, indent=2) + "\n")


def listed_overlays(folder: str | Path, name: str = MANIFEST) -> set[str]:
    """Names of the overlays that the manifest of `folder` lists; empty without a manifest of this package."""
    try:
        content = json.loads(read_text(Path(folder) / name))
        overlays = [image["overlays"] for image in content["images"]]
        names = [name for by_method in overlays for files in by_method.values() for name in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in names if isinstance(name, str) and _is_overlay_name(name)}


def remove_overlays(folder: str | Path, names: Iterable[str]) -> list[str]:
    """Remove these overlays of an earlier run; returns the names of those that were there.

    Links and folders are not removed: `steadygaze` writes plain files.
    """
    removed = []
    for name in sorted(names):
        path = Path(folder) / name
        if path.is_file() and not path.is_symlink():
            path.unlink()
            removed.append(name)
    return removed


def _is_overlay_name(name: str) -> bool:
    return name.endswith(".png") and name == Path(name).name and "\0" not in name


def image_entry(
    name: str,
    logits: Float[Tensor, " c"],
    target: Tensor | None,
    overlays: Mapping[str, Sequence[str]],
    *,
    class_names: Sequence[str] | None = None,
    file: str | Path | None = None,
    outputs: Outputs = "classes",
    checks: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """The manifest's entry of one image.

    A prediction is {"class": index, "name", "probability"}, or {"label": index, "name", "probability"}, or
    {"output": index, "name", "value"}. The three most probable classes or labels are listed, and every label
    above 0.5; of values all.

    Args:
        target: The explained class (label, value), or several; None if no class is explained.
        overlays: Names of the overlay files by method.
        checks: What `Attribution.check_entries` gives by method; methods without a check are left out.
    """
    stored = {method: list(entries) for method, entries in (checks or {}).items() if entries}
    numbers = predictions(outputs, logits.detach().cpu().double())
    key = "output" if outputs in ("values", "features") else NOUNS[outputs]
    number = "value" if key == "output" else "probability"

    def describe(index: int) -> dict[str, Any]:
        name = class_names[index] if class_names else None
        return {key: index, "name": name, number: round(float(numbers[index]), 6)}

    if outputs in ("values", "features"):
        best = list(range(len(numbers))) if outputs == "values" else []  # features predict nothing
    else:
        present = int((numbers > PRESENT).sum()) if outputs == "labels" else 0
        best = numbers.topk(min(max(PREDICTIONS, present), len(numbers))).indices.tolist()
    targets = [] if target is None else target.reshape(-1).tolist()
    return {
        "name": name,
        **({} if file is None else {"file": str(file)}),
        "predictions": [describe(index) for index in best],
        "targets": [describe(index) for index in targets],
        "overlays": {method: list(files) for method, files in overlays.items()},
        **({"checks": stored} if stored else {}),
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
