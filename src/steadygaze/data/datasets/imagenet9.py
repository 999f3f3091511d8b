"""ImageNet-9's backgrounds challenge, in the folders of its authors (MadryLab/backgrounds_challenge).

    FOLDER/mixed_rand/val/00_dog/fg_n02497673_05944_bg_n02536864_02721.JPEG
    FOLDER/in_to_in9.json     {"0": 8, ...}: which of the nine classes an ImageNet class belongs to, -1 none

Xiao et al., ICLR 2021, arXiv:2006.09994. `val/` may be left out. The class of a background is that of the
original image that its name ends with; of mixed_next it is the next class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steadygaze.data.folders import Item, interleave
from steadygaze.data.images import images_in
from steadygaze.errors import InputError
from steadygaze.untrusted import read_text

VARIANTS = (
    *("original", "only_fg", "mixed_same", "mixed_rand", "mixed_next"),
    *("only_bg_b", "only_bg_t", "no_fg"),
)
CLASSES = (
    "dog",
    "bird",
    "wheeled vehicle",
    "reptile",
    "carnivore",
    "insect",
    "musical instrument",
    "primate",
    "fish",
)
MAP = "in_to_in9.json"
SOURCE = re.compile(r"n\d{8}_\d+")
CLASS_FOLDER = re.compile(r"(\d\d)_\w+")


@dataclass(frozen=True)
class Mixed(Item):
    """An image of a variant. background: class of its background; None if it is its own, or not known."""

    background: int | None = None


def read_imagenet9(folder: Path) -> dict[str, list[Mixed]]:
    """The images of each variant that is there, classes interleaved."""
    present = [name for name in VARIANTS if (folder / name).is_dir()]
    if not present:
        raise InputError(f"{folder}: expected the folders {', '.join(VARIANTS)}, or some of them, found none")
    labels = {name: dict(_labels(folder / name)) for name in present}
    sources = {path.stem: label for paths in labels.values() for path, label in paths.items()}
    return {name: _items(name, paths, sources) for name, paths in labels.items()}


def _labels(variant: Path) -> Iterator[tuple[Path, int]]:
    root = variant / "val" if (variant / "val").is_dir() else variant
    for path in images_in(root):
        match = CLASS_FOLDER.fullmatch(path.relative_to(root).parts[0])
        if match is None or int(match[1]) >= len(CLASSES):
            raise InputError(f"{path}: expected class folders such as {root}/00_dog, 00 to 08")
        yield path, int(match[1])


def _items(variant: str, labels: dict[Path, int], sources: dict[str, int]) -> list[Mixed]:
    groups: dict[int, list[Item]] = {}
    for path, label in labels.items():
        ids = SOURCE.findall(path.stem)
        background = sources.get(ids[-1]) if len(ids) == 2 else None
        if variant == "mixed_next":
            background = (label + 1) % len(CLASSES)
        name = f"{path.parent.name}/{path.name}"
        groups.setdefault(label, []).append(
            Mixed(name, path, label, background=None if background == label else background)
        )
    items = interleave([groups[label] for label in sorted(groups)])
    return [item for item in items if isinstance(item, Mixed)]


def read_class_map(folder: Path, given: Path | None) -> list[int]:
    """Which of the nine classes each of ImageNet's 1,000 belongs to; -1 for none."""
    file = next(
        (path for path in (given, folder / MAP, folder.parent / MAP) if path and path.is_file()), None
    )
    if file is None:
        raise InputError(
            f"{given or folder / MAP}: no such file. A model with 1,000 classes needs {MAP} of the "
            "backgrounds challenge: put it into the folder, or give in_to_in9=FILE",
            option="in_to_in9",
        )
    try:
        table = {int(key): int(value) for key, value in json.loads(read_text(file)).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: expected a class of ImageNet-9 for each of ImageNet's ({error})"
        ) from error
    mapped = [table.get(index, -1) for index in range(1000)]
    if set(mapped) == {-1} or not set(mapped) <= set(range(-1, len(CLASSES))):
        raise InputError(f"{file}: expected numbers of -1 to 8, got {sorted(set(mapped))[:12]}")
    return mapped
