"""Labelled pictures in folders.

| layout | label |
| --- | --- |
| `FOLDER/<class>/**/*.jpg` | a synset (n02123045), an index (281), or a class name ("tabby cat") |
| `FOLDER/index.csv` | columns `image`, one of `imagenet_index`, `index`, `label`, `synset`, `class`, and maybe `mask` |

Pictures are put into an order that visits the classes evenly: one of every class before the second of any, classes in
bit-reversed order. So the first N pictures are an even sample for any N, without chance, and a smaller sample is part
of a larger one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from steadygaze.data.images import SUFFIXES, below
from steadygaze.errors import BadInput, UnknownName

SYNSET = re.compile(r"n\d{8}")
LABELS = ("imagenet_index", "index", "label", "synset", "class", "name")


@dataclass(frozen=True)
class Item:
    """One picture: its name (the path below the folder), its file, its label (None: not one of the model's), its
    mask."""

    name: str
    path: Path
    label: int | None
    mask: Path | None = None


class Classes:
    """From what a folder is called to a class of the model."""

    def __init__(self, names: Sequence[str] | None, count: int) -> None:
        self.names, self.count = names, count

    def index(self, text: str) -> int:
        """The class that `text` names: a synset, an index or a name."""
        text = text.strip()
        if SYNSET.fullmatch(text):
            return self._synset(text)
        if text.isdecimal():
            if int(text) >= self.count:
                raise BadInput(f"class {text} is out of range: the model has classes 0..{self.count - 1}")
            return int(text)
        if not self._named:
            raise BadInput(
                f"expected a class index or a synset, got {text!r}: the {self.count} classes of this model have no names"
            )
        for known in (self._named, self._parts):
            found = known.get(_plain(text), set())
            if len(found) > 1:
                raise BadInput(
                    f"{text!r} names the classes {sorted(found)}: use the index or the synset instead"
                )
            if found:
                return next(iter(found))
        raise UnknownName("class", text, self._parts, "Name folders by synset, index or class name.")

    def _synset(self, text: str) -> int:
        if not self._synsets:
            raise BadInput(
                f"{text} is an ImageNet synset, but the model has {self.count} classes: name folders by index or class name"
            )
        if text not in self._synsets:
            raise UnknownName("class", text, self._synsets, "It is no synset of the model's classes.")
        return self._synsets[text]

    @cached_property
    def _synsets(self) -> dict[str, int]:
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = infer_imagenet_subset({"num_classes": self.count})
        return (
            {} if subset is None else {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())}
        )

    @cached_property
    def _named(self) -> dict[str, set[int]]:
        return _lookup((name, i) for i, name in enumerate(self.names or ()))

    @cached_property
    def _parts(self) -> dict[str, set[int]]:
        return _lookup((part, i) for i, name in enumerate(self.names or ()) for part in name.split(","))


def _lookup(pairs: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, index in pairs:
        found.setdefault(_plain(name), set()).add(index)
    return found


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").split())


def pictures_in(folder: Path) -> list[Path]:
    """Every picture below a folder, by name; none is an error."""
    if not folder.is_dir():
        raise BadInput(
            f"expected a folder of pictures, got {folder}: {'a file' if folder.exists() else 'no such folder'}"
        )
    found = sorted(below(folder))
    if not found:
        raise BadInput(f"expected pictures in {folder}, found none ({', '.join(sorted(SUFFIXES))})")
    return found


def by_class(folder: Path, classes: Classes) -> list[Item]:
    """The pictures of FOLDER/<class>/, in an order that visits the classes evenly."""
    groups: dict[str, list[Path]] = {}
    for path in pictures_in(folder):
        inside = path.relative_to(folder)
        if len(inside.parts) < 2:
            raise BadInput(
                f"{path} lies in no class folder: expected {folder}/<class>/{path.name}, the class a synset, an index or a name"
            )
        groups.setdefault(inside.parts[0], []).append(path)
    labels = {name: classes.index(name) for name in groups}
    items = [
        [Item(path.relative_to(folder).as_posix(), path, labels[name]) for path in paths]
        for name, paths in groups.items()
    ]
    return evenly(items)


def from_index(file: Path, classes: Classes) -> list[Item]:
    """The pictures that an index.csv lists, in an order that visits the classes evenly."""
    root = file.parent
    groups: dict[str, list[Item]] = {}
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            columns = reader.fieldnames or []
            label = next((name for name in LABELS if name in columns), None)
            if "image" not in columns or label is None:
                raise BadInput(
                    f"{file}: expected the columns image and one of {', '.join(LABELS)}, got {', '.join(columns) or 'nothing'}"
                )
            for row in reader:
                if not row["image"] or not row[label]:
                    raise BadInput(f"{file}, line {reader.line_num}: image or {label} is empty")
                index, mask = classes.index(row[label]), row.get("mask")
                item = Item(
                    Path(row["image"]).as_posix(), root / row["image"], index, root / mask if mask else None
                )
                groups.setdefault(row[label], []).append(item)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{file} cannot be read as a table ({error})") from error
    if not groups:
        raise BadInput(f"{file} lists no picture")
    return evenly(list(groups.values()))


def evenly(groups: Sequence[Sequence[Item]]) -> list[Item]:
    """One of every group, then the second of every group, and so on; groups in bit-reversed order of their number.

    >>> [i.name for i in evenly([[Item(f"{g}{n}", Path(), 0) for n in "ab"] for g in range(4)])]
    ['0a', '2a', '1a', '3a', '0b', '2b', '1b', '3b']
    """
    bits = max(1, (len(groups) - 1).bit_length())
    order = sorted(range(len(groups)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    longest = max((len(group) for group in groups), default=0)
    return [groups[g][turn] for turn in range(longest) for g in order if turn < len(groups[g])]
