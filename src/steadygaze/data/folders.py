"""Labeled images in folders.

| layout | label |
| --- | --- |
| `FOLDER/<class>/**/*.jpg` | a synset (n02123045), an index (281), or a class name ("tabby cat") |
| `FOLDER/index.csv` | columns `image`, one of LABEL_COLUMNS, and optionally `mask` and any other |
| `FOLDER/metadata.csv` | the same, or as Waterbirds and WILDS have it (`data/datasets/wilds.py`) |

Images are put into an order that visits the classes evenly: one of every class before the second of any,
classes in bit-reversed order. So the first N images are an even sample for any N, without randomness, and a
smaller sample is part of a larger one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from steadygaze.data.images import EncodedImage, images_in
from steadygaze.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    import pandas as pd

SYNSET = re.compile(r"n\d{8}")
LABEL_COLUMNS = ("imagenet_index", "index", "label", "synset", "class", "name")
IMAGE, MASK = "image", "mask"  # columns of an index.csv


@dataclass(frozen=True)
class Item:
    """One image file.

    Attributes:
        name: As written to rows; for a file, its path below the folder.
        path: The file; for an encoded image, the archive or data set that holds it.
        label: None if it is not one of the model's classes.
        mask: The file of its mask or label map, if it has one.
        group: The group of images that it belongs to, if groups were asked for.
        encoded: Reads an image that is part of another file; None for a file.
    """

    name: str
    path: Path
    label: int | None
    mask: Path | EncodedImage | None = None
    group: str = field(default="", kw_only=True)
    encoded: EncodedImage | None = field(default=None, kw_only=True)

    @property
    def source(self) -> Path | EncodedImage:
        """What `read_image` reads."""
        return self.path if self.encoded is None else self.encoded


class ClassLookup:
    """Finds the class of the model that the name of a folder, or a cell of an index.csv, stands for."""

    def __init__(self, names: Sequence[str] | None, count: int) -> None:
        self.names, self.count = names, count

    def index(self, text: str) -> int:
        """The class with this synset, index or name."""
        text = text.strip()
        if SYNSET.fullmatch(text) and text not in self._by_name:  # the classes may be named by synsets
            return self._synset_index(text)
        if text.isdecimal():
            if int(text) >= self.count:
                raise InputError(f"class {text} is out of range: the model has classes 0..{self.count - 1}")
            return int(text)
        if not self._by_name:
            raise InputError(
                f"expected a class index or a synset, got {text!r}: "
                f"the {self.count} classes of this model have no names"
            )
        for lookup in (self._by_name, self._by_part):
            matches = lookup.get(_normalized(text), set())
            if len(matches) > 1:
                raise InputError(
                    f"{text!r} is the name of the classes {sorted(matches)}: "
                    "use the index or the synset instead"
                )
            if matches:
                return next(iter(matches))
        raise UnknownNameError("class", text, self._by_part, "Name folders by synset, index or class name.")

    def _synset_index(self, text: str) -> int:
        if not self._synsets:
            raise InputError(
                f"{text} is an ImageNet synset, but the model has {self.count} classes: "
                "name folders by index or class name"
            )
        if text not in self._synsets:
            raise UnknownNameError("class", text, self._synsets, "The model has no class with this synset.")
        return self._synsets[text]

    @cached_property
    def _synsets(self) -> dict[str, int]:
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = infer_imagenet_subset({"num_classes": self.count})
        if subset is None:
            return {}
        return {synset: index for index, synset in enumerate(ImageNetInfo(subset).label_names())}

    @cached_property
    def _by_name(self) -> dict[str, set[int]]:
        return _lookup((name, index) for index, name in enumerate(self.names or ()))

    @cached_property
    def _by_part(self) -> dict[str, set[int]]:
        """Classes by each of the names between commas: "tabby, tabby cat"."""
        return _lookup(
            (part, index) for index, name in enumerate(self.names or ()) for part in name.split(",")
        )


class Unlabeled(ClassLookup):
    """Labels every image 0, for images whose folders are not classes; images need no class folder."""

    def __init__(self) -> None:
        super().__init__(None, 1)

    def index(self, text: str) -> int:
        """Return 0, whatever the name."""
        return 0


def _lookup(pairs: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
    lookup: dict[str, set[int]] = {}
    for name, index in pairs:
        lookup.setdefault(_normalized(name), set()).add(index)
    return lookup


def _normalized(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").split())


def read_class_folders(folder: Path, classes: ClassLookup) -> list[Item]:
    """The images of FOLDER/<class>/, interleaved by class."""
    groups: dict[str, list[Path]] = {}
    for path in images_in(folder):
        inside = path.relative_to(folder)
        if len(inside.parts) < 2 and not isinstance(classes, Unlabeled):
            raise InputError(
                f"{path} is in no class folder: expected {folder}/<class>/{path.name}, "
                "the class a synset, an index or a name"
            )
        groups.setdefault(inside.parts[0] if len(inside.parts) > 1 else "", []).append(path)
    labels = {name: classes.index(name) for name in groups}
    return interleave(
        [
            [Item(path.relative_to(folder).as_posix(), path, labels[name]) for path in paths]
            for name, paths in groups.items()
        ]
    )


def read_index(file: Path, classes: ClassLookup, groups: Sequence[str] = ()) -> list[Item]:
    """The images that an index.csv lists, interleaved by class. groups: columns whose values are a group."""
    return table_items(file, read_table(file), classes, groups)


def table_items(
    file: Path, table: pd.DataFrame, classes: ClassLookup, groups: Sequence[str] = ()
) -> list[Item]:
    """The images of a table with the columns of an index.csv, interleaved by class. file: whose folder paths
    are relative to."""
    columns = list(table.columns)
    label_column = next((name for name in LABEL_COLUMNS if name in columns), None)
    if IMAGE not in columns or label_column is None:
        raise InputError(
            f"{file}: expected the columns image and one of {', '.join(LABEL_COLUMNS)}, "
            f"got {', '.join(columns) or 'nothing'}"
        )
    check_group_columns(groups, columns)
    masks = table[MASK] if MASK in columns else [""] * len(table)
    by_class: dict[str, list[Item]] = {}
    cells = [table[name] for name in groups]
    rows = zip(table[IMAGE], table[label_column], masks, *cells, strict=True)
    for number, (image, label, mask, *values) in enumerate(rows, start=1):
        if not image or not label:
            raise InputError(f"{file}, row {number}: image or {label_column} is empty")
        mask_file = file.parent / mask if mask else None
        group = group_name(groups, values)
        item = Item(Path(image).as_posix(), file.parent / image, classes.index(label), mask_file, group=group)
        by_class.setdefault(label, []).append(item)
    if not by_class:
        raise InputError(f"{file} lists no images")
    return interleave(list(by_class.values()))


def check_group_columns(groups: Sequence[str], columns: Iterable[str]) -> None:
    """UnknownNameError for a column that is not there."""
    known = list(columns)
    for name in groups:
        if name not in known:
            raise UnknownNameError("column", name, known, option="groups")


def group_name(columns: Sequence[str], values: Sequence[object]) -> str:
    """The name of a group.

    Examples:
        >>> group_name(["y", "place"], [0, 1])
        'y=0, place=1'
    """
    return ", ".join(f"{name}={value}" for name, value in zip(columns, values, strict=True))


def read_table(file: Path, rows: int | None = None) -> pd.DataFrame:
    """Every cell as text; empty cells are empty texts. rows: at most this many."""
    import pandas as pd

    try:
        table = pd.read_csv(
            file, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False, nrows=rows
        )
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except (OSError, ValueError) as error:  # ParserError and UnicodeDecodeError are ValueErrors
        raise InputError(f"{file} cannot be read as a table ({error})") from error
    return table.fillna("")


def interleave(groups: Sequence[Sequence[Item]]) -> list[Item]:
    """One of every group, then the second of every group, and so on; groups in bit-reversed order.

    Examples:
        >>> [item.name for item in interleave([[Item(f"{g}{n}", Path(), 0) for n in "ab"] for g in range(4)])]
        ['0a', '2a', '1a', '3a', '0b', '2b', '1b', '3b']
    """
    bits = max(1, (len(groups) - 1).bit_length())
    order = sorted(range(len(groups)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    longest = max((len(group) for group in groups), default=0)
    return [groups[g][turn] for turn in range(longest) for g in order if turn < len(groups[g])]
