"""Labeled image sets with a training and a test part, for k-nearest neighbors on a model's features.

| set | layout |
| --- | --- |
| iNaturalist 2021 mini | `train_mini/<00000_..._species>/*.jpg`, `val/<the same>/*.jpg`; 10,000 species |
| CIFAR-100 | see `cifar100` |
| pneumonia X-ray | `chest_xray/{train,val,test}/{NORMAL,PNEUMONIA}/*.jpeg` |
| any other | `train/<class>/*.jpg` and `test/<class>/*.jpg` (or `val`), or two folders of class folders |

A set that lacks something is an error that lists it; `partial=True` accepts what is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from steadygaze.data.datasets.cifar100 import read_cifar100
from steadygaze.data.datasets.tree import (
    abbreviated,
    check_complete,
    check_count,
    image_files,
    require_folder,
    subfolders,
)
from steadygaze.data.images import read_image
from steadygaze.errors import InputError


@dataclass(frozen=True, eq=False)
class ImagePart:
    """Labeled images, from files or from one array (N, H, W, 3); `part[i]` is an RGB image."""

    labels: Int[np.ndarray, " n"]
    sources: Sequence[Path] | UInt8[np.ndarray, "n h w 3"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Image.Image:
        source = self.sources[i]
        return Image.fromarray(source) if isinstance(source, np.ndarray) else read_image(source)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A training and a test part with classes of their own. notes: what is missing, empty if nothing is."""

    name: str
    classes: tuple[str, ...]
    train: ImagePart
    test: ImagePart
    notes: tuple[str, ...] = ()


class Reader(Protocol):
    def __call__(self, root: str | Path, *, partial: bool = False) -> ImageSet: ...


def inaturalist_mini(root: str | Path, *, partial: bool = False) -> ImageSet:
    """iNaturalist 2021 with its mini training set; the test part is its validation set."""
    dataset = "iNaturalist 2021 mini"
    expected = "a folder with train_mini/<00000_..._species>/ and val/<the same>/"
    root = require_folder(root, dataset, expected)
    splits = [require_folder(root / name, dataset, expected) for name in ("train_mini", "val")]
    train_species, test_species = (set(subfolders(split)) for split in splits)
    species = sorted(train_species | test_species)
    unexpected = [name for name in species if not re.fullmatch(r"\d{5}_.+", name)]
    if unexpected:
        raise InputError(
            f"{dataset}: expected species folders such as 00000_Animalia_..., got {abbreviated(unexpected)}"
        )
    notes = [
        check_complete(dataset, split, "species folder", species, subfolders(split), partial=partial)
        for split in splits
    ]
    notes.append(check_count(dataset, root, "species", len(species), 10_000, partial=partial))
    if partial:  # a class is of use only with training and test images
        species = sorted(train_species & test_species)
    return _from_folders("inaturalist-2021-mini", dataset, splits, species, notes)


def pneumonia(root: str | Path, *, validation: bool = False, partial: bool = False) -> ImageSet:
    """Chest X-rays of Kermany et al., two classes. validation: test on val (16 images) instead of test."""
    dataset = "pneumonia X-ray"
    expected = "a folder chest_xray with train/, val/ and test/, each with NORMAL/ and PNEUMONIA/"
    root = require_folder(root, dataset, expected)
    if (root / "chest_xray").is_dir():  # as the archive unpacks
        root = root / "chest_xray"
    names = ("train", "val" if validation else "test")
    splits = [require_folder(root / name, dataset, expected) for name in names]
    classes = ("NORMAL", "PNEUMONIA")
    for split in splits:
        check_complete(dataset, split, "class folder", classes, subfolders(split), partial=False)
    image_set = _from_folders("pneumonia", dataset, splits, classes, [])
    parts, counts = (image_set.train, image_set.test), (5216, 16 if validation else 624)
    notes = [
        check_count(dataset, split, "images", len(part), count, partial=partial)
        for split, part, count in zip(splits, parts, counts, strict=True)
    ]
    return replace(image_set, notes=tuple(filter(None, notes)))


def cifar100(root: str | Path, *, coarse: bool = False, partial: bool = False) -> ImageSet:
    """CIFAR-100, the Python or the binary version, always complete. coarse: the 20 superclasses."""
    classes, train, test = read_cifar100(root, coarse=coarse)
    name = "cifar-100-coarse" if coarse else "cifar-100"
    return ImageSet(name, classes, ImagePart(*train), ImagePart(*test))


SETS: dict[str, Reader] = {
    "inaturalist-2021-mini": inaturalist_mini,
    "cifar-100": cifar100,
    "pneumonia": pneumonia,
}


def two_folders(
    name: str, train: str | Path, test: str | Path | None = None, *, partial: bool = False
) -> ImageSet:
    """Images in class folders, for training and for testing.

    Without `test`, `train` holds both: train/ and test/ (or val/).
    """
    expected = "train/<class>/ and test/<class>/ (or val/<class>/), or two folders of class folders"
    train = require_folder(train, name, expected)
    if test is None:
        root = train
        train = require_folder(
            root / "train", name, f"{expected}. The published sets are called {', '.join(SETS)}"
        )
        has_only_val = (root / "val").is_dir() and not (root / "test").is_dir()
        test = root / ("val" if has_only_val else "test")
    splits = [train, require_folder(test, name, expected)]
    classes, test_classes = (subfolders(split) for split in splits)
    note = check_complete(name, splits[1], "class folder", classes, test_classes, partial=partial)
    return _from_folders(name, name, splits, test_classes if partial else classes, [note])


def read_image_set(
    name: str, train: str | Path, test: str | Path | None = None, *, partial: bool = False
) -> ImageSet:
    """The published set of that name, or two folders under that name."""
    if test is None and name in SETS:
        return SETS[name](train, partial=partial)
    return two_folders(name, train, test, partial=partial)


def _from_folders(
    name: str, dataset: str, splits: list[Path], classes: Sequence[str], notes: list[str]
) -> ImageSet:
    train, test = (_part(dataset, split, classes) for split in splits)
    return ImageSet(name, tuple(classes), train, test, tuple(filter(None, notes)))


def _part(dataset: str, split: Path, classes: Sequence[str]) -> ImagePart:
    by_class = [image_files(split / class_name) for class_name in classes]
    empty = [class_name for class_name, files in zip(classes, by_class, strict=True) if not files]
    if empty or not classes:
        raise InputError(
            f"{dataset}: expected images in {split}/<class>/, found none in {abbreviated(empty) or 'any'}"
        )
    labels = [label for label, files in enumerate(by_class) for _ in files]
    return ImagePart(np.array(labels), [path for files in by_class for path in files])
