"""A shifted data set, and how folders of images by class, JSON files and tables are read for it."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from PIL import Image

from steadygaze.data.benchmarks import (
    complete,
    complete_count,
    folder,
    folders_in,
    imagenet_synsets,
)
from steadygaze.data.dataset_tree import image_files
from steadygaze.data.folders import Item, evenly
from steadygaze.data.images import read_image
from steadygaze.errors import BadInput


@dataclass(frozen=True)
class Shifted(Item):
    """An image with every class that is correct for it; `label` is the first. group: a part of the set that
    is scored separately."""

    right: tuple[int, ...] = ()
    group: str = ""


@dataclass(frozen=True)
class Shift:
    """A data set. classes: the official restriction, None for all 1,000. border: pixels to cut off each side.
    ready: the images already have the model's size and are not resized. left_out: {reason: names}. notes:
    what is missing."""

    name: str
    items: list[Shifted]
    classes: tuple[int, ...] | None = None
    border: int = 0
    ready: bool = False
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def read(self, item: Item) -> Image.Image:
        """The image as RGB, without its border if it has one."""
        image = read_image(item.path)
        if not self.border:
            return image
        return image.crop((self.border, self.border, image.width - self.border, image.height - self.border))


def read_synset_folders(
    what: str,
    root: str | Path,
    synsets: Sequence[str],
    expected: int,
    *,
    partial: bool,
    group: Callable[[Path], str] | str = "",
) -> Shift:
    """The images of ROOT/<synset>/, each labelled with the class of its synset."""
    root = folder(root, what, f"a folder with {len(synsets)} synset folders such as {synsets[0]}/")
    place = {s: i for i, s in enumerate(imagenet_synsets())}
    made = read_class_folders(
        what, root, {s: (place[s],) for s in synsets}, expected, partial=partial, group=group
    )
    classes = tuple(sorted(place[s] for s in synsets)) if len(synsets) < 1000 else None
    return Shift(what, made.items, classes, notes=made.notes)


def read_class_folders(
    what: str,
    root: Path,
    right: Mapping[str, tuple[int, ...]],
    expected: int | None,
    *,
    partial: bool,
    group: Callable[[Path], str] | str = "",
    others: bool = False,
    above: Path | None = None,
) -> Shift:
    """The images of ROOT/<folder>/, labelled with the classes of their folder, in an order that visits the
    classes evenly."""
    present = [name for name in folders_in(root) if name in right or not others]
    notes = [complete(what, root, "class folder", right, present, partial=partial)]
    groups = []
    for name in present:
        found = image_files(root / name)
        if not found and not partial:
            raise BadInput(
                f"{what}: {root / name} contains no image. Incomplete download? partial=True reads what is "
                "there"
            )
        notes.append("" if found else f"{name} is empty")
        base = root if above is None else above
        paths = ((p, p.relative_to(base).as_posix()) for p in found)
        groups.append(
            [
                Shifted(rel, p, right[name][0], None, right[name], group(p) if callable(group) else group)
                for p, rel in paths
            ]
        )
    items = cast(list[Shifted], evenly(groups))
    if not items:
        raise BadInput(f"{what}: expected images in {root}/<class>/, found none")
    if expected is not None:
        notes.append(complete_count(what, root, "images", len(items), expected, partial=partial))
    return Shift(what, items, notes=tuple(note for note in notes if note))


def read_json(what: str, file: Path, kind: type) -> Any:
    """The content of a JSON file, which must be a non-empty `kind`."""
    if not file.is_file():
        raise BadInput(f"{what}: {file} is missing; it comes with the data set")
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{what}: {file} cannot be read as JSON ({error}): truncated?") from error
    if not isinstance(read, kind) or not read:
        raise BadInput(
            f"{what}: expected {file} to hold a {kind.__name__} with entries, got {type(read).__name__}"
        )
    return read


def read_table(what: str, file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file that must have these columns."""
    with file.open(newline="", encoding="utf-8-sig") as opened:
        reader = csv.DictReader(opened)
        missing = [c for c in columns if c not in (reader.fieldnames or ())]
        if missing:
            raise BadInput(
                f"{what}: {file} lacks the columns {', '.join(missing)}; expected {', '.join(columns)}"
            )
        return list(reader)
