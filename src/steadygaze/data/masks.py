"""Pictures with masks, and masks brought to what the model sees: 255 object, 128 border (not measured), 0 rest.

| layout | where | what a mask's pixels mean |
| --- | --- | --- |
| index.csv | column `mask` | 255 object, 128 border, 0 background; or 1 object, 0 background |
| pairs | MASKS holds the same paths as FOLDER, as .png | the same |
| ImageNet-S | `validation/`, `validation-segmentation/`, or train-semi | R + 256·G: a class, 0 other, 1000 border |
| Pascal VOC | `JPEGImages/`, `SegmentationClass/`, `ImageSets/Segmentation/val.txt` | 1..20, 255 border |

Of a picture with several objects, those of its label's class are the object. VOC pictures are labelled with the class
that covers most pixels, if the model knows it by name or has just these 20 classes; otherwise they have no label, and
every object counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from steadygaze.data.folders import Classes, Item, by_class, evenly, from_index, pictures_in
from steadygaze.errors import BadImage, BadInput, SteadygazeError

OBJECT, BORDER = 255, 128
VOC = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
IMAGENET_S = (("validation", "validation-segmentation"), ("train-semi", "train-semi-segmentation"))
IMAGENET_S_SIZES = (50, 300, 919)  # its editions; in these a class is its synset's place, counted from 1

Pixels = UInt8[np.ndarray, "h w"]
Decode = Callable[[Image.Image, Item], Pixels]


@dataclass(frozen=True)
class Labelled:
    """The pictures of a run, how their masks are to be read, and how many pictures were left out for lack of one."""

    items: list[Item]
    decode: Decode | None = None
    without: int = 0
    layout: str = "class folders"


def find(
    folder: str | Path, masks: str | Path | None, classes: Classes, limit: int | None = None
) -> Labelled:
    """The labelled pictures of `folder`, whatever its layout, with their masks if there are any."""
    found = _find(Path(folder), None if masks is None else Path(masks), classes)
    return replace(found, items=found.items[:limit])


def _find(folder: Path, masks: Path | None, classes: Classes) -> Labelled:
    if not folder.is_dir():
        raise BadInput(
            f"expected a folder of pictures, got {folder}: {'a file' if folder.exists() else 'no such folder'}"
        )
    if masks is not None and not masks.is_dir():
        raise BadInput(
            f"expected a folder of masks, got {masks}: {'a file' if masks.exists() else 'no such folder'}"
        )
    for place in (folder, masks):
        if place is not None and (place / "index.csv").is_file():
            return _with_index(place / "index.csv", masks, classes)
    if (folder / "JPEGImages").is_dir() and (folder / "SegmentationClass").is_dir():
        return _voc(folder, classes)
    for pictures, segmentations in IMAGENET_S:
        if (folder / pictures).is_dir() and (folder / segmentations).is_dir():
            return _imagenet_s(folder / pictures, folder / segmentations, classes)
    items = by_class(folder, classes)
    if masks is None:
        return Labelled(items)
    if masks.name in dict(IMAGENET_S).values():
        return _imagenet_s(folder, masks, classes)
    return _paired(items, masks, plain, "pairs")


def _with_index(file: Path, masks: Path | None, classes: Classes) -> Labelled:
    items = from_index(file, classes)
    have = [item for item in items if item.mask is not None]
    if not have:
        if masks is not None:
            raise BadInput(f"{file} has no column mask: expected the path of a mask for each picture")
        return Labelled(items, layout="index.csv")
    return Labelled(have, plain, len(items) - len(have), "index.csv")


def _paired(items: list[Item], masks: Path, decode: Decode, layout: str) -> Labelled:
    """Each picture with the mask of the same path; pictures without one are left out."""
    have = [
        replace(item, mask=mask)
        for item in items
        if (mask := (masks / item.name).with_suffix(".png")).is_file()
    ]
    if not have:
        raise BadInput(
            f"no picture has a mask: expected {(masks / items[0].name).with_suffix('.png')}, and so on"
        )
    return Labelled(have, decode, len(items) - len(have), layout)


def _imagenet_s(pictures: Path, masks: Path, classes: Classes) -> Labelled:
    folders = sorted(path.name for path in pictures.iterdir() if path.is_dir())
    place = {name: i + 1 for i, name in enumerate(folders)} if len(folders) in IMAGENET_S_SIZES else {}

    def decode(mask: Image.Image, item: Item) -> Pixels:
        rgb = np.asarray(mask.convert("RGB"), dtype=np.int32)
        ids = rgb[..., 0] + 256 * rgb[..., 1]
        own = place.get(item.name.split("/")[0]) or _most_frequent(ids, leave_out=(0, 1000))
        return _coded(ids == own, ids == 1000)

    return _paired(by_class(pictures, classes), masks, decode, "ImageNet-S")


def voc_stems(folder: Path, part: str) -> list[str]:
    """What Pascal VOC lists as segmented pictures of a part; without a list, every picture that has a map."""
    listing = folder / "ImageSets" / "Segmentation" / f"{part}.txt"
    if listing.is_file():
        return listing.read_text(encoding="utf-8").split()
    return [path.stem for path in pictures_in(folder / "SegmentationClass")]


def _voc(folder: Path, classes: Classes) -> Labelled:
    known = {number: _voc_label(number, classes) for number in range(1, 21)}
    groups: dict[int, list[Item]] = {}
    for stem in voc_stems(folder, "val"):
        mask = folder / "SegmentationClass" / f"{stem}.png"
        item = Item(f"JPEGImages/{stem}.jpg", folder / "JPEGImages" / f"{stem}.jpg", None, mask)
        number = 0
        if any(label is not None for label in known.values()):
            number = _most_frequent(indices(_open(mask)), leave_out=(0, 255))
        groups.setdefault(number, []).append(replace(item, label=known.get(number)))
    if not groups:
        raise BadInput(f"{folder} is laid out as Pascal VOC, but lists no segmented picture")

    def decode(mask: Image.Image, item: Item) -> Pixels:
        ids = indices(mask)
        own = (
            ids == _most_frequent(ids, leave_out=(0, 255))
            if item.label is not None
            else (ids > 0) & (ids < 255)
        )
        return _coded(own, ids == 255)

    return Labelled(evenly([groups[number] for number in sorted(groups)]), decode, 0, "Pascal VOC")


def _voc_label(number: int, classes: Classes) -> int | None:
    try:
        return classes.index(VOC[number - 1])
    except SteadygazeError:
        return number - 1 if classes.count == len(VOC) and not classes.names else None


def plain(mask: Image.Image, item: Item) -> Pixels:
    """A mask of 255, 128 and 0, or of 1 and 0."""
    pixels = indices(mask)
    values = set(np.unique(pixels).tolist())
    if values <= {0, 1}:
        return _coded(pixels == 1, np.zeros_like(pixels, dtype=bool))
    if not values <= {0, BORDER, OBJECT}:
        raise BadImage(
            f"{item.mask}: expected a mask of 255 (object), 128 (border) and 0, or of 1 and 0; got {sorted(values)[:8]}"
        )
    return pixels


def read_mask(item: Item, decode: Decode, size: tuple[int, int] | None = None) -> Image.Image:
    """The mask of a picture, as 255, 128 and 0; size: the picture's width and height, which the mask must have."""
    assert item.mask is not None
    opened = _open(item.mask)
    if size is not None and opened.size != size:
        raise BadImage(
            f"{item.mask}: the mask is {opened.width}x{opened.height}, its picture {item.path.name} is "
            f"{size[0]}x{size[1]}. "
            "Both must have one size."
        )
    return Image.fromarray(decode(opened, item))


def geometry(source: str, recipe: dict[str, Any]) -> Callable[[Image.Image], Image.Image]:
    """Resize and crop as the model's preprocessing does, without mixing pixels (nearest): for masks."""
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    if (
        source == "timm" or "resize" not in recipe
    ):  # what `steadygaze train` wrote says it as timm does, whatever the library
        from timm.data import create_transform

        steps = create_transform(**recipe, is_training=False).transforms
        steps = [
            step for step in steps if not type(step).__name__.endswith(("ToTensor", "ToNumpy", "Normalize"))
        ]
        for step in steps:
            if hasattr(
                step, "interpolation"
            ):  # set here, since timm hands none on where pictures are not square
                step.interpolation = InterpolationMode.NEAREST
        return Compose(steps)
    steps = [Resize(recipe["resize"], InterpolationMode.NEAREST)]
    return Compose([*steps, *([CenterCrop(recipe["crop"])] if recipe["crop"] else [])])


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as opened:
            opened.load()
            return ImageOps.exif_transpose(opened)
    except FileNotFoundError as error:
        raise BadImage(f"{path}: no such mask") from error
    except Exception as error:  # PIL's decoders raise whatever their format calls for
        raise BadImage(
            f"{path}: does not decode as a mask ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


def indices(mask: Image.Image) -> Pixels:
    """Palette masks as their indices, others as grey."""
    return np.array(mask if mask.mode in ("P", "L") else mask.convert("L"), dtype=np.uint8)


def _most_frequent(ids: np.ndarray, leave_out: tuple[int, ...]) -> int:
    values, counts = np.unique(ids[~np.isin(ids, leave_out)], return_counts=True)
    return int(values[counts.argmax()]) if len(values) else -1


def _coded(inside: np.ndarray, border: np.ndarray) -> Pixels:
    return np.where(border, BORDER, np.where(inside, OBJECT, 0)).astype(np.uint8)
