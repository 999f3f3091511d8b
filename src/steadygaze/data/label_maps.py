"""Pictures with a class for every pixel: label maps of classes 0, 1, ... and 255 where nothing counts.

| layout | where | classes |
| --- | --- | --- |
| Cityscapes | `leftImg8bit/val/<city>/`, `gtFine/val/<city>/*_gtFine_labelTrainIds.png` (or `_labelIds`) | its 19; others ignored |
| ADE20K | `images/validation/`, `annotations/validation/` (the 2016 challenge) | its 150; 0, other, ignored |
| Pascal VOC | `JPEGImages/`, `SegmentationClass/`, `ImageSets/Segmentation/val.txt` | background and its 20; 255 ignored |
| your own | MASKS holds the same paths as FOLDER, as .png, and `classes.txt` | a line of classes.txt each; 255 ignored |
| masks of an object | every other layout of `data.masks`: index.csv, pairs, ImageNet-S | background, object; the border is ignored |

`train` pictures are taken from the part of that name (Cityscapes and VOC: train, ADE20K: training) where the layout has parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from steadygaze.data.confusion import IGNORED
from steadygaze.data.folders import Classes, Item, evenly, pictures_in
from steadygaze.data.masks import BORDER, OBJECT, VOC, Decode, Labelled, Pixels, find, indices, voc_stems
from steadygaze.errors import BadImage, BadInput

CITYSCAPES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain", "sky", "person",
    "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
CITYSCAPES_IDS = (
    7,
    8,
    11,
    12,
    13,
    17,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    28,
    31,
    32,
    33,
)  # labelIds of these classes
ADE20K = 150


@dataclass(frozen=True)
class Segmented(Labelled):
    """Pictures whose masks decode to classes; names: of the classes, where they are known."""

    classes: int = 2
    names: tuple[str, ...] | None = None


class _Whatever(Classes):
    """The class of the whole picture does not matter here: every name is one."""

    def __init__(self) -> None:
        super().__init__(None, 1)

    def index(self, text: str) -> int:
        return 0


def find_maps(
    folder: str | Path, masks: str | Path | None = None, part: str = "test", limit: int | None = None
) -> Segmented:
    """The pictures of `folder` with their label maps, in whatever layout of the table above."""
    root = Path(folder)
    if masks is not None and (Path(masks) / "classes.txt").is_file():
        found = _own(root, Path(masks))
    elif (root / "leftImg8bit").is_dir() and (root / "gtFine").is_dir():
        found = _cityscapes(root, "train" if part == "train" else "val")
    elif (root / "annotations").is_dir() and (root / "images").is_dir():
        found = _ade20k(root, "training" if part == "train" else "validation")
    elif (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        found = _voc(root, "train" if part == "train" else "val")
    else:
        found = _objects(root, masks)
    return replace(found, items=found.items[:limit])


def _objects(root: Path, masks: str | Path | None) -> Segmented:
    labelled = find(root, masks, _Whatever())
    if labelled.decode is None:
        raise BadInput(f"segmentation: expected masks: --masks FOLDER, or a column mask in {root}/index.csv")
    coded = labelled.decode

    def decode(mask: Image.Image, item: Item) -> Pixels:
        pixels = coded(mask, item)
        return np.where(pixels == BORDER, IGNORED, pixels == OBJECT).astype(np.uint8)

    return Segmented(labelled.items, decode, labelled.without, labelled.layout, 2, ("background", "object"))


def _own(root: Path, masks: Path) -> Segmented:
    names = tuple(filter(None, (masks / "classes.txt").read_text(encoding="utf-8").split("\n")))
    if not 2 <= len(names) <= IGNORED:
        raise BadInput(
            f"{masks / 'classes.txt'}: expected from 2 to {IGNORED} names of classes, one a line, got {len(names)}"
        )
    items = [
        _item(root, path, (masks / path.relative_to(root)).with_suffix(".png")) for path in pictures_in(root)
    ]
    return _paired(items, _numbered(range(len(names)), strict=True), "your own", len(names), names)


def _voc(root: Path, part: str) -> Segmented:
    made = [
        _item(root, root / "JPEGImages" / f"{s}.jpg", root / "SegmentationClass" / f"{s}.png")
        for s in voc_stems(root, part)
    ]
    names = ("background", *VOC)
    return _paired(made, _numbered(range(len(names))), "Pascal VOC", len(names), names)


def _cityscapes(root: Path, part: str) -> Segmented:
    cities: dict[str, list[Item]] = {}
    kinds = {"labelTrainIds": range(len(CITYSCAPES)), "labelIds": CITYSCAPES_IDS}
    pictures = pictures_in(root / "leftImg8bit" / part)
    ends = None
    for path in pictures:
        stem = path.name.removesuffix("_leftImg8bit.png")
        maps = {
            kind: root / "gtFine" / part / path.parent.name / f"{stem}_gtFine_{kind}.png" for kind in kinds
        }
        ends = ends or next((kind for kind in kinds if maps[kind].is_file()), None)
        cities.setdefault(path.parent.name, []).append(_item(root, path, maps[ends or "labelTrainIds"]))
    items = evenly([cities[name] for name in sorted(cities)])
    return _paired(
        items, _numbered(kinds[ends or "labelTrainIds"]), "Cityscapes", len(CITYSCAPES), CITYSCAPES
    )


def _ade20k(root: Path, part: str) -> Segmented:
    pictures = pictures_in(root / "images" / part)
    items = [_item(root, path, root / "annotations" / part / f"{path.stem}.png") for path in pictures]
    return _paired(items, _numbered(range(1, ADE20K + 1)), "ADE20K", ADE20K, None)


def _item(root: Path, picture: Path, mask: Path) -> Item:
    return Item(picture.relative_to(root).as_posix(), picture, 0, mask)


def _paired(
    items: list[Item], decode: Decode, layout: str, classes: int, names: tuple[str, ...] | None
) -> Segmented:
    have = [item for item in items if item.mask is not None and item.mask.is_file()]
    if not have:
        raise BadInput(
            f"{layout}: no picture has a label map: expected {items[0].mask if items else 'pictures'}, and so on"
        )
    return Segmented(have, decode, len(items) - len(have), layout, classes, names)


def _numbered(ids: Sequence[int], strict: bool = False) -> Decode:
    """Values of the file, in the order of the classes; every other value is ignored, or with `strict` an error."""
    table = np.full(256, IGNORED, np.uint8)
    table[list(ids)] = np.arange(len(ids))

    def decode(mask: Image.Image, item: Item) -> Pixels:
        if mask.mode not in ("P", "L"):
            raise BadImage(
                f"{item.mask}: expected a map of class numbers, one channel of 8 bits, got a picture of mode {mask.mode}"
            )
        values = indices(mask)
        if strict and (other := set(np.unique(values).tolist()) - {*ids, IGNORED}):
            raise BadImage(
                f"{item.mask}: expected classes 0..{len(ids) - 1}, and {IGNORED} where nothing counts, got {sorted(other)[:8]}"
            )
        return table[values]

    return decode
