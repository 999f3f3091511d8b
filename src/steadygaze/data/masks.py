"""Labeled images with object masks: 255 object, 128 border (not measured), 0 background.

| layout | where | values in the mask file |
| --- | --- | --- |
| index.csv, metadata.csv | column `mask` | 255 object, 128 border, 0 background; or 1 object, 0 background |
| pairs | MASKS holds the same paths as FOLDER, as .png | the same |
| pairs | a folder in MASKS for each image (a/b.jpg -> a/b/*.png), one mask for each part | the same |
| ImageNet-S | `validation/`, `validation-segmentation/` | R + 256·G: a class, 0 other, 1000 border |
| Pascal VOC | `JPEGImages/`, `SegmentationClass/`, `ImageSets/Segmentation/val.txt` | 1..20, 255 border |

In an image with several objects, those of its label's class are the object. VOC images are labeled with the
class that covers most pixels, if the model has a class of that name or has just these 20 classes. Otherwise
they have no label, and every object counts. Several masks of an image are joined: object before border before
background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from steadygaze.data.datasets.wilds import METADATA, lists_images, read_metadata
from steadygaze.data.folders import (
    ClassLookup,
    Item,
    interleave,
    read_class_folders,
    read_index,
    table_items,
)
from steadygaze.data.images import EncodedImage, images_in, read_stored
from steadygaze.errors import ImageError, InputError, SteadygazeError
from steadygaze.untrusted import read_text

OBJECT, BORDER = 255, 128
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
VOC_BORDER = 255
IMAGENET_S_FOLDERS = {
    "validation": "validation-segmentation",
    "train-semi": "train-semi-segmentation",
}  # images: masks
IMAGENET_S_SIZES = (50, 300, 919)  # classes of its editions: a class is the rank of its synset, from 1
IMAGENET_S_BORDER = 1000

Pixels = UInt8[np.ndarray, "h w"]
Decode = Callable[[Image.Image, Item], Pixels]  # from a mask file to 255, 128 and 0


@dataclass(frozen=True)
class LabeledImages:
    """Images with labels, and masks if there are any.

    Attributes:
        decode: How their masks are read; None without masks.
        without: Number of images that were left out because they have no mask.
        layout: Layout of the folder, one of the table above or "class folders".
    """

    items: list[Item]
    decode: Decode | None = None
    without: int = 0
    layout: str = "class folders"

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def count(self) -> int:
        """The number of images."""
        return len(self.items)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {item.name: position for position, item in enumerate(self.items)}

    def position(self, name: str) -> int:
        """The position of an image."""
        return self._positions[name]

    def find(self, names: Sequence[str]) -> Iterator[Item]:
        """The images of these names."""
        yield from (self.items[self.position(name)] for name in names)


def find_labeled_images(
    folder: str | Path,
    masks: str | Path | None,
    classes: ClassLookup,
    limit: int | None = None,
    groups: Sequence[str] = (),
) -> LabeledImages:
    """The labeled images of a folder in any of the layouts, or of a CSV file, with their masks.

    Args:
        groups: Columns of the CSV file whose values name the group of an image.
    """
    images = _find(Path(folder), None if masks is None else Path(masks), classes, groups)
    return replace(images, items=images.items[:limit])


def _find(folder: Path, masks: Path | None, classes: ClassLookup, groups: Sequence[str]) -> LabeledImages:
    if masks is not None:
        require_folder(masks, "masks")
    if folder.suffix == ".csv" and folder.is_file():
        return _from_index(folder, masks, classes, groups)
    require_folder(folder, "images")
    for root in (folder, masks):
        if root is not None and (root / "index.csv").is_file():
            return _from_index(root / "index.csv", masks, classes, groups)
    if lists_images(folder / METADATA):
        return _from_index(folder / METADATA, masks, classes, groups)
    if groups:
        raise InputError(
            f"groups: expected a table with the column {groups[0]}, such as {folder / 'index.csv'}, "
            "found none",
            option="groups",
        )
    if (folder / "JPEGImages").is_dir() and (folder / "SegmentationClass").is_dir():
        return _from_voc(folder, classes)
    for images, segmentations in IMAGENET_S_FOLDERS.items():
        if (folder / images).is_dir() and (folder / segmentations).is_dir():
            return _from_imagenet_s(folder / images, folder / segmentations, classes)
    items = read_class_folders(folder, classes)
    if masks is None:
        return LabeledImages(items)
    if masks.name in IMAGENET_S_FOLDERS.values():
        return _from_imagenet_s(folder, masks, classes)
    return _paired(items, masks, decode_object_mask, "pairs")


def require_folder(path: Path, content: str) -> None:
    """Raise `InputError` unless there is such a folder. content: what is expected in it."""
    if not path.is_dir():
        state = "a file" if path.exists() else "no such folder"
        raise InputError(f"expected a folder of {content}, got {path}: {state}")


def _from_index(file: Path, masks: Path | None, classes: ClassLookup, groups: Sequence[str]) -> LabeledImages:
    if file.name == METADATA:
        items = table_items(file, read_metadata(file), classes, groups)
    else:
        items = read_index(file, classes, groups)
    layout = METADATA if file.name == METADATA else "index.csv"
    with_mask = [item for item in items if item.mask is not None]
    if with_mask:
        return LabeledImages(with_mask, decode_object_mask, len(items) - len(with_mask), layout)
    if masks is not None:
        raise InputError(f"{file} has no column mask: expected the path of a mask for each image")
    return LabeledImages(items, layout=layout)


def _paired(items: list[Item], masks: Path, decode: Decode, layout: str) -> LabeledImages:
    """Each image with the mask of the same path; images without one are left out."""

    def found(item: Item) -> Path | None:
        file = (masks / item.name).with_suffix(".png")
        parts = file.with_suffix("")
        return file if file.is_file() else parts if parts.is_dir() and images_in(parts) else None

    candidates = [replace(item, mask=found(item)) for item in items]
    with_mask = [item for item in candidates if item.mask is not None]
    if not with_mask:
        expected = (masks / items[0].name).with_suffix(".png")
        raise InputError(f"no image has a mask: expected {expected}, and so on")
    return LabeledImages(with_mask, decode, len(items) - len(with_mask), layout)


def _from_imagenet_s(images: Path, masks: Path, classes: ClassLookup) -> LabeledImages:
    synsets = sorted(path.name for path in images.iterdir() if path.is_dir())
    is_edition = len(synsets) in IMAGENET_S_SIZES
    class_ids = {synset: rank for rank, synset in enumerate(synsets, start=1)} if is_edition else {}

    def decode(mask: Image.Image, item: Item) -> Pixels:
        rgb = np.asarray(mask.convert("RGB"), dtype=np.int32)
        ids = rgb[..., 0] + 256 * rgb[..., 1]
        synset = item.name.split("/")[0]
        own = class_ids.get(synset) or _most_frequent(ids, leave_out=(0, IMAGENET_S_BORDER))
        return _coded(ids == own, ids == IMAGENET_S_BORDER)

    return _paired(read_class_folders(images, classes), masks, decode, "ImageNet-S")


def voc_stems(folder: Path, part: str) -> list[str]:
    """Names of the segmented images that Pascal VOC lists for a part; without a list, all with a map."""
    listing = folder / "ImageSets" / "Segmentation" / f"{part}.txt"
    if listing.is_file():
        return read_text(listing).split()
    return [path.stem for path in images_in(folder / "SegmentationClass")]


def _from_voc(folder: Path, classes: ClassLookup) -> LabeledImages:
    labels = {class_id: _voc_label(class_id, classes) for class_id in range(1, len(VOC_CLASSES) + 1)}
    any_known = any(label is not None for label in labels.values())
    groups: dict[int, list[Item]] = {}
    for stem in voc_stems(folder, "val"):
        mask = folder / "SegmentationClass" / f"{stem}.png"
        class_id = 0
        if any_known:
            class_id = _most_frequent(mask_values(_open(mask)), leave_out=(0, VOC_BORDER))
        image = Path("JPEGImages") / f"{stem}.jpg"
        item = Item(image.as_posix(), folder / image, labels.get(class_id), mask)
        groups.setdefault(class_id, []).append(item)
    if not groups:
        raise InputError(f"{folder} is laid out as Pascal VOC, but lists no segmented images")

    def decode(mask: Image.Image, item: Item) -> Pixels:
        ids = mask_values(mask)
        if item.label is None:
            inside = (ids > 0) & (ids < VOC_BORDER)
        else:
            inside = ids == _most_frequent(ids, leave_out=(0, VOC_BORDER))
        return _coded(inside, ids == VOC_BORDER)

    items = interleave([groups[class_id] for class_id in sorted(groups)])
    return LabeledImages(items, decode, 0, "Pascal VOC")


def _voc_label(class_id: int, classes: ClassLookup) -> int | None:
    try:
        return classes.index(VOC_CLASSES[class_id - 1])
    except SteadygazeError:
        has_voc_classes = classes.count == len(VOC_CLASSES) and not classes.names
        return class_id - 1 if has_voc_classes else None


def decode_object_mask(mask: Image.Image, item: Item) -> Pixels:
    """A mask of 255, 128 and 0, or of 1 and 0."""
    pixels = mask_values(mask)
    values = set(np.unique(pixels).tolist())
    if values <= {0, 1}:
        return _coded(pixels == 1, np.zeros_like(pixels, dtype=bool))
    if not values <= {0, BORDER, OBJECT}:
        raise ImageError(
            f"{item.mask}: expected a mask of 255 (object), 128 (border) and 0, or of 1 and 0; "
            f"got {sorted(values)[:8]}"
        )
    return pixels


def read_mask(item: Item, decode: Decode, size: tuple[int, int] | None = None) -> Image.Image:
    """The mask of an image, decoded. size: width and height of the image, which the mask must have."""
    assert item.mask is not None
    if isinstance(item.mask, Path) and item.mask.is_dir():
        parts = [read_mask(replace(item, mask=part), decode, size) for part in images_in(item.mask)]
        return Image.fromarray(np.maximum.reduce([np.asarray(part) for part in parts]))
    mask = _open(item.mask)
    if size is not None and mask.size != size:
        raise ImageError(
            f"{item.mask}: the mask is {mask.width}x{mask.height}, its image {item.name} is "
            f"{size[0]}x{size[1]}. Both must have the same size."
        )
    return Image.fromarray(decode(mask, item))


def _open(source: Path | EncodedImage) -> Image.Image:
    return read_stored(source, "mask")


def mask_values(mask: Image.Image) -> Pixels:
    """The indices of a palette image, the gray levels of others."""
    return np.array(mask if mask.mode in ("P", "L") else mask.convert("L"), dtype=np.uint8)


def _most_frequent(ids: np.ndarray, leave_out: tuple[int, ...]) -> int:
    values, counts = np.unique(ids[~np.isin(ids, leave_out)], return_counts=True)
    return int(values[counts.argmax()]) if len(values) else -1


def _coded(inside: np.ndarray, border: np.ndarray) -> Pixels:
    return np.where(border, BORDER, np.where(inside, OBJECT, 0)).astype(np.uint8)
