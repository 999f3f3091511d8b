"""Cue-conflict images of Geirhos et al. 2019.

Images: FOLDER/<shape class>/<shape><n>-<texture><m>.png. `cat1-truck3.png` has the shape of a cat and the
texture of a truck. The 80 images whose cues agree (`cat1-cat3.png`) do not distinguish the cues and are left
out. The 16 groups are those of the authors' code, or of FOLDER/classes.json (class -> ImageNet indices).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from steadygaze.data.datasets.imagenet import IMAGENET_CLASSES
from steadygaze.data.datasets.tree import (
    abbreviated,
    check_complete,
    check_count,
    image_files,
    require_folder,
    subfolders,
)
from steadygaze.data.folders import Item, interleave
from steadygaze.errors import InputError

NAME = "cue_conflict"
EXPECTED = 1280  # images, 80 of each shape class
CLASSES_FILE = "classes.json"
MAX_CLASSES_BYTES = 1_000_000
FILE_NAME = re.compile(r"([a-z]+)\d+-([a-z]+)\d+")
Groups = Mapping[str, tuple[int, ...]]  # class -> its ImageNet classes


@dataclass(frozen=True)
class CueItem(Item):
    """An image with two cues. label: the class of its shape; texture: that of its texture."""

    texture: int = 0


@dataclass(frozen=True)
class CueConflict:
    """The images, in an order that visits the shape classes evenly, and the classes they are made of.

    Attributes:
        agreeing: Images that are left out because both cues are of one class.
    """

    items: tuple[CueItem, ...]
    groups: Groups
    agreeing: int = 0
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.groups)


@cache
def sixteen_classes() -> Groups:
    """The 16 classes of the authors, each with its ImageNet classes."""
    text = (files("steadygaze") / "assets" / "sixteen_classes.json").read_text(encoding="utf-8")
    return {name: tuple(indices) for name, indices in json.loads(text).items()}


def read_cue_conflict(folder: str | Path, *, partial: bool = False) -> CueConflict:
    """The images of a folder; partial: accept an incomplete download."""
    root = require_folder(folder, NAME, "a folder with one folder for each shape class, such as cat/")
    groups = _classes_of(root / CLASSES_FILE)
    names = list(groups)
    present = subfolders(root)
    notes = [check_complete(NAME, root, "shape class folder", names, present, partial=partial)]
    by_shape: list[list[Item]] = []
    count = agreeing = 0
    for shape in present:
        paths = image_files(root / shape)
        items = [_item(root, path, shape, names) for path in paths]
        conflicting = [item for item in items if item.label != item.texture]
        count, agreeing = count + len(items), agreeing + len(items) - len(conflicting)
        by_shape.append(list(conflicting))
    notes.append(check_count(NAME, root, "images", count, EXPECTED, partial=partial))
    ordered = tuple(cast(list[CueItem], interleave([group for group in by_shape if group])))
    if not ordered:
        raise InputError(f"{NAME}: expected images such as {root}/cat/cat1-truck3.png, found none")
    return CueConflict(ordered, groups, agreeing, tuple(note for note in notes if note))


def _item(root: Path, path: Path, shape: str, names: list[str]) -> CueItem:
    """The image with the classes that its name states."""
    match = FILE_NAME.fullmatch(path.stem)
    if match is None:
        raise InputError(
            f"{NAME}: expected names of both cues, shape first, such as cat1-truck3{path.suffix}, got {path}"
        )
    if match[1] != shape:
        raise InputError(f"{NAME}: expected a file of the shape {shape} in {root / shape}, got {path.name}")
    if match[2] not in names:
        raise InputError(
            f"{NAME}: {path} has the texture {match[2]!r}, which is not a class. Expected one of "
            f"{abbreviated(names)}"
        )
    name = path.relative_to(root).as_posix()
    return CueItem(name, path, names.index(shape), None, names.index(match[2]))


def _classes_of(file: Path) -> Groups:
    """The classes of a folder: of its file, or the authors'."""
    if not file.exists():
        return sixteen_classes()
    try:
        if file.stat().st_size > MAX_CLASSES_BYTES:
            raise ValueError(f"it has more than {MAX_CLASSES_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{NAME}: {file} cannot be read as JSON ({error}). Fetch it again.") from error
    if not isinstance(content, dict) or len(content) < 2:
        raise InputError(
            f"{NAME}: expected {file} to map classes to ImageNet indices, such as {{'cat': [281]}}"
        )
    seen: dict[int, str] = {}
    for name, indices in content.items():
        if not isinstance(indices, list) or not indices or not all(map(_is_index, indices)):
            raise InputError(
                f"{NAME}: {file}: {name}: expected ImageNet indices from 0 to {IMAGENET_CLASSES - 1}, "
                f"got {str(indices)[:80]}"
            )
        for index in indices:
            if index in seen:
                raise InputError(
                    f"{NAME}: {file}: the ImageNet class {index} belongs to both {seen[index]} and {name}. "
                    "Remove one of them."
                )
            seen[index] = name
    return {name: tuple(indices) for name, indices in content.items()}


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < IMAGENET_CLASSES
