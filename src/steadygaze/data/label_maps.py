"""Label maps, a class for every pixel: how they are read, and their confusion matrices, IoU and mIoU.

Equations: docs/equations.md#miou.

| symbol | variable |
| --- | --- |
| n_tp, number of pixels of class t that are predicted as p | `confusion[..., t, p]` |
| IoU_c = n_cc / (Σ_p n_cp + Σ_t n_tc − n_cc) | `iou` |
| mIoU, mean of IoU_c over the classes that occur in the truth or in the prediction | `miou` |

The mIoU of a data set is that of its SUMMED counts, as PASCAL VOC and Cityscapes define it, not the mean over
images.

Label maps hold the classes 0, 1, ... and 255 where no class counts.

| layout | images and label maps | classes |
| --- | --- | --- |
| Cityscapes | `leftImg8bit/val/<city>/`, `gtFine/val/<city>/*_labelTrainIds.png` (or labelIds) | its 19 |
| ACDC | `rgb_anon/<fog, night, ...>/val/<sequence>/`, `gt/.../*_gt_labelTrainIds.png` | those of Cityscapes |
| ADE20K (2016 challenge) | `images/validation/`, `annotations/validation/` | its 150; 0 is ignored |
| Pascal VOC | `JPEGImages/`, `SegmentationClass/`, `ImageSets/Segmentation/val.txt` | background and its 20 |
| your own | MASKS holds the same paths as FOLDER, as .png, and `classes.txt` | a line of classes.txt each |
| object masks | every other layout of `masks`: index.csv, pairs, ImageNet-S | background and object |

All other values of the files are ignored, and so is the border of object masks. With part "train", images
come from the training part (Cityscapes, ACDC and VOC: train, ADE20K: training) where the layout has parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from steadygaze.data.datasets.acdc import ACDC, ACDC_CONDITIONS
from steadygaze.data.datasets.tree import subfolders
from steadygaze.data.folders import ClassLookup, Item, interleave
from steadygaze.data.images import images_in
from steadygaze.data.masks import (
    BORDER,
    OBJECT,
    VOC_CLASSES,
    Decode,
    LabeledImages,
    Pixels,
    find_labeled_images,
    mask_values,
    voc_stems,
)
from steadygaze.errors import ImageError, InputError
from steadygaze.quantity import iou_from_counts
from steadygaze.untrusted import read_text

IGNORED = 255  # value of pixels that are not counted


def confusion(
    predicted: Int[Tensor, "b h w"], truth: Tensor, num_classes: int, *, ignored: int = IGNORED
) -> Int[Tensor, "b c c"]:
    """Number of pixels of each true class (rows) that are predicted as each class (columns), for every image.

    Examples:
        >>> confusion(torch.tensor([[[0, 1]]]), torch.tensor([[[0, 255]]]), 2).tolist()
        [[[1, 0], [0, 0]]]
    """
    if predicted.dim() != 3 or predicted.shape != truth.shape:
        raise InputError(
            "expected label maps (B, H, W) of one size, "
            f"got {tuple(predicted.shape)} and {tuple(truth.shape)}"
        )
    counted = truth != ignored
    for name, labels in (("predicted", predicted), ("truth", truth[counted])):
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            exception = f", and {ignored} for pixels that are not counted" if name == "truth" else ""
            raise InputError(
                f"{name}: expected classes 0..{num_classes - 1}{exception}, "
                f"got {int(labels.min())}..{int(labels.max())}"
            )
    image = torch.arange(len(predicted), device=predicted.device).view(-1, 1, 1)
    cells = (image * num_classes + truth.long()) * num_classes + predicted.long()
    counts = torch.bincount(cells[counted], minlength=len(predicted) * num_classes**2)
    return counts.view(len(predicted), num_classes, num_classes)


def overlaps(counts: Int[Tensor, "*b c c"]) -> Int[Tensor, "*b 3 c"]:
    """Number of pixels of each class that are correct, predicted, and true: all that IoU needs."""
    return torch.stack([counts.diagonal(dim1=-2, dim2=-1), counts.sum(-2), counts.sum(-1)], -2)


def iou(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b c"]:
    """Intersection over union of each class, 0..1, higher is better; NaN for a class that does not occur.

    Examples:
        >>> iou(torch.tensor([[3, 1], [0, 4]])).tolist()
        [0.75, 0.800000011920929]
    """
    values: Tensor = iou_from_counts(*overlaps(counts).unbind(-2))
    return values


def miou(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b"]:
    """Mean of `iou` over the classes that occur, 0..1, higher is better.

    Examples:
        >>> round(miou(torch.tensor([[3, 1], [0, 4]])).item(), 3)  # rows: true; columns: predicted class
        0.775
    """
    return iou(counts).nanmean(-1)


def pixel_accuracy(counts: Int[Tensor, "*b c c"]) -> Float[Tensor, "*b"]:
    """Share of the counted pixels whose class is correct, 0..1, higher is better.

    Examples:
        >>> pixel_accuracy(torch.tensor([[3, 1], [0, 4]])).item()
        0.875
    """
    return counts.diagonal(dim1=-2, dim2=-1).sum(-1) / counts.sum((-2, -1))


CITYSCAPES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # their labelIds
ADE20K_CLASSES = 150


@dataclass(frozen=True)
class SegmentationImages(LabeledImages):
    """Images whose masks decode to label maps.

    Attributes:
        classes: Number of classes.
        names: Names of the classes, where they are known.
    """

    classes: int = 2
    names: tuple[str, ...] | None = None


class _AnyClass(ClassLookup):
    """Accepts every name: the class of the whole image does not matter here."""

    def __init__(self) -> None:
        super().__init__(None, 1)

    def index(self, text: str) -> int:
        return 0


def find_label_maps(
    folder: str | Path, masks: str | Path | None = None, part: str = "test", limit: int | None = None
) -> SegmentationImages:
    """The images of a folder with their label maps, in any of the layouts above."""
    images = _find(Path(folder), None if masks is None else Path(masks), training=part == "train")
    return replace(images, items=images.items[:limit])


def _find(root: Path, masks: Path | None, *, training: bool) -> SegmentationImages:
    if masks is not None and (masks / "classes.txt").is_file():
        return _from_own_classes(root, masks)
    if (root / "leftImg8bit").is_dir() and (root / "gtFine").is_dir():
        return _from_cityscapes(root, "train" if training else "val")
    if (root / "rgb_anon").is_dir() and (root / "gt").is_dir():
        return _from_acdc(root, "train" if training else "val")
    if (root / "annotations").is_dir() and (root / "images").is_dir():
        return _from_ade20k(root, "training" if training else "validation")
    if (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        return _from_voc(root, "train" if training else "val")
    return _from_object_masks(root, masks)


def _from_object_masks(root: Path, masks: Path | None) -> SegmentationImages:
    images = find_labeled_images(root, masks, _AnyClass())
    if images.decode is None:
        raise InputError(
            f"segmentation: expected a folder of masks, or a column mask in {root}/index.csv", option="masks"
        )
    decode_mask = images.decode

    def decode(mask: Image.Image, item: Item) -> Pixels:
        pixels = decode_mask(mask, item)
        return np.where(pixels == BORDER, IGNORED, pixels == OBJECT).astype(np.uint8)

    names = ("background", "object")
    return SegmentationImages(images.items, decode, images.without, images.layout, len(names), names)


def _from_own_classes(root: Path, masks: Path) -> SegmentationImages:
    listing = masks / "classes.txt"
    names = tuple(filter(None, read_text(listing).split("\n")))
    if not 2 <= len(names) <= IGNORED:
        raise InputError(
            f"{listing}: expected 2 to {IGNORED} class names, one on each line, got {len(names)}"
        )
    items = [
        _item(root, image, (masks / image.relative_to(root)).with_suffix(".png")) for image in images_in(root)
    ]
    return _with_maps(items, _decode_ids(range(len(names)), strict=True), "your own", len(names), names)


def _from_voc(root: Path, part: str) -> SegmentationImages:
    items = [
        _item(root, root / "JPEGImages" / f"{stem}.jpg", root / "SegmentationClass" / f"{stem}.png")
        for stem in voc_stems(root, part)
    ]
    names = ("background", *VOC_CLASSES)
    return _with_maps(items, _decode_ids(range(len(names))), "Pascal VOC", len(names), names)


def _from_cityscapes(root: Path, part: str) -> SegmentationImages:
    class_ids: dict[str, Sequence[int]] = {
        "labelTrainIds": range(len(CITYSCAPES)),
        "labelIds": CITYSCAPES_IDS,
    }
    kind: str | None = None  # of the maps: that of the first image which has one
    cities: dict[str, list[Item]] = {}
    for image in images_in(root / "leftImg8bit" / part):
        city, stem = image.parent.name, image.name.removesuffix("_leftImg8bit.png")
        maps = {name: root / "gtFine" / part / city / f"{stem}_gtFine_{name}.png" for name in class_ids}
        kind = kind or next((name for name in class_ids if maps[name].is_file()), None)
        cities.setdefault(city, []).append(_item(root, image, maps[kind or "labelTrainIds"]))
    items = interleave([cities[name] for name in sorted(cities)])
    decode = _decode_ids(class_ids[kind or "labelTrainIds"])
    return _with_maps(items, decode, "Cityscapes", len(CITYSCAPES), CITYSCAPES)


def _from_acdc(root: Path, part: str) -> SegmentationImages:
    """Adverse conditions, in turn; the classes are those of Cityscapes."""
    present = subfolders(root / "rgb_anon")
    unexpected = sorted(set(present) - set(ACDC_CONDITIONS))
    if unexpected or not present:
        raise InputError(
            f"{ACDC}: expected folders {', '.join(ACDC_CONDITIONS)} in {root / 'rgb_anon'}, "
            f"got {', '.join(unexpected) or 'none'}"
        )
    class_ids: dict[str, Sequence[int]] = {
        "labelTrainIds": range(len(CITYSCAPES)),
        "labelIds": CITYSCAPES_IDS,
    }
    kind: str | None = None  # of the maps: that of the first image which has one
    conditions = []
    for condition in present:
        images = root / "rgb_anon" / condition / part
        if not images.is_dir():
            raise InputError(f"{ACDC}: {images} is missing. Incomplete download? Fetch the rest.")
        items = []
        for image in images_in(images):
            stem = image.name.removesuffix("_rgb_anon.png")
            folder = root / "gt" / condition / part / image.parent.relative_to(images)
            maps = {name: folder / f"{stem}_gt_{name}.png" for name in class_ids}
            kind = kind or next((name for name in class_ids if maps[name].is_file()), None)
            items.append(_item(root, image, maps[kind or "labelTrainIds"]))
        conditions.append(items)
    decode = _decode_ids(class_ids[kind or "labelTrainIds"])
    return _with_maps(interleave(conditions), decode, ACDC, len(CITYSCAPES), CITYSCAPES)


def _from_ade20k(root: Path, part: str) -> SegmentationImages:
    items = [
        _item(root, image, root / "annotations" / part / f"{image.stem}.png")
        for image in images_in(root / "images" / part)
    ]
    return _with_maps(items, _decode_ids(range(1, ADE20K_CLASSES + 1)), "ADE20K", ADE20K_CLASSES, None)


def _item(root: Path, image: Path, label_map: Path) -> Item:
    return Item(image.relative_to(root).as_posix(), image, 0, label_map)


def _with_maps(
    items: list[Item], decode: Decode, layout: str, num_classes: int, names: tuple[str, ...] | None
) -> SegmentationImages:
    """The images that have a label map."""
    with_map = [item for item in items if isinstance(item.mask, Path) and item.mask.is_file()]
    if not with_map:
        example = items[0].mask if items else "images"
        raise InputError(f"{layout}: no image has a label map: expected {example}, and so on")
    without = len(items) - len(with_map)
    return SegmentationImages(with_map, decode, without, layout, num_classes, names)


def _decode_ids(ids: Sequence[int], strict: bool = False) -> Decode:
    """Class c has the value ids[c] in the file; every other value is ignored, or with `strict` an error."""
    table = np.full(256, IGNORED, np.uint8)
    table[list(ids)] = np.arange(len(ids))

    def decode(mask: Image.Image, item: Item) -> Pixels:
        if mask.mode not in ("P", "L"):
            raise ImageError(
                f"{item.mask}: expected a map of class numbers, one channel of 8 bits, "
                f"got an image of mode {mask.mode}"
            )
        values = mask_values(mask)
        unknown = set(np.unique(values).tolist()) - {*ids, IGNORED}
        if strict and unknown:
            raise ImageError(
                f"{item.mask}: expected classes 0..{len(ids) - 1}, and {IGNORED} for pixels that are not "
                f"counted, got {sorted(unknown)[:8]}"
            )
        return table[values]

    return decode
