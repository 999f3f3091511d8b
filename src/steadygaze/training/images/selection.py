"""The images and masks that a recipe selects, checked before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from steadygaze.data.confusion import IGNORED
from steadygaze.data.folders import ClassLookup, Item
from steadygaze.data.images import SUFFIXES, image_size
from steadygaze.data.label_maps import SegmentationImages, find_label_maps
from steadygaze.data.masks import OBJECT, LabelledImages, find_labelled_images, read_mask
from steadygaze.data.streams import open_stream
from steadygaze.data.streams.sample import FilePart, Unusable
from steadygaze.data.streams.spec import StreamSpec, is_stream
from steadygaze.errors import BadImage, BadInput
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.training.recipe import Data


def class_folders(folder: str) -> tuple[str, ...] | None:
    """The class names of a new classifier: sorted names of a folder's class folders, or the label names of
    shards; None if there is an index.csv."""
    if is_stream(folder):
        return StreamSpec.parse(folder).label_names
    root = Path(folder)
    if root.suffix == ".csv" and root.is_file():
        return None
    if not root.is_dir():
        reason = "a file" if root.exists() else "no such folder"
        raise BadInput(f"data.train: expected a folder of images, got {folder!r}: {reason}")
    if (root / "index.csv").is_file():
        return None
    return tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))


def select_images(data: Data, part: str, classes: ClassLookup | None, masks: str | None) -> LabelledImages:
    """The labelled images of a recipe, for "train" or "test".

    classes: of the classifier; None for segmentation, whose images have label maps
    masks: folder of the masks, None if they are not needed
    """
    prefix = "test_" if part == "test" else ""
    folder: str = getattr(data, part)
    only: list[str] | None = getattr(data, f"{prefix}only")
    class_range: list[int] | None = getattr(data, f"{prefix}classes")
    image_range: list[int] | None = getattr(data, f"{prefix}images")
    if classes is None:
        labelled: LabelledImages = find_label_maps(folder, masks, part)
    elif is_stream(folder):
        labelled = _listed_shards(StreamSpec.parse(folder), part, classes)
    else:
        labelled = find_labelled_images(folder, masks, classes)
    items = [item for item in labelled.items if item.label is not None]
    if masks is not None and not is_stream(folder):
        _check_masks_have_images(Path(masks), Path(folder), items)
    for item in items:
        if item.encoded is None and not item.path.is_file():
            with_mask = ", with a mask," if item.mask else ""
            raise BadInput(f"data.{part}: {item.path} is listed{with_mask} but does not exist")
    if only is not None and classes is not None:
        wanted = {classes.index(text) for text in only}
        items = [item for item in items if item.label in wanted]
    if class_range is not None:
        labels = sorted({item.label for item in items if item.label is not None})
        chosen = set(labels[slice(*class_range)])
        items = [item for item in items if item.label in chosen]
    if image_range is not None:
        items = _range_of_each_class(items, image_range)
    if not items:
        raise BadInput(f"data.{part}: the recipe selects no image of {folder}")
    return replace(labelled, items=items)


def _listed_shards(spec: StreamSpec, part: str, classes: ClassLookup) -> LabelledImages:
    """All images of local shards: their places are listed once, and each is read when it is needed."""
    if spec.kind != "wds":
        raise BadInput(f"data.{part}: expected a folder or local WebDataset shards (wds:...), got {spec}")
    stream = open_stream(spec, classes)
    items = []
    for item in stream:
        if isinstance(item.encoded, Unusable):
            raise BadInput(f"data.{part}: {item.encoded.reason}")
        if not isinstance(item.encoded, FilePart):
            raise BadInput(
                f"data.{part}: training reads images in random order: expected local tar archives that are "
                f"not compressed, got {item.path}"
            )
        items.append(item)
    if stream.damaged:
        raise BadInput(f"data.{part}: {stream.damaged[0]}")
    return LabelledImages(items, stream.decode, layout=stream.layout)


def _range_of_each_class(items: Sequence[Item], image_range: Sequence[int]) -> list[Item]:
    first, stop = image_range
    seen: Counter[int | None] = Counter()
    kept = []
    for item in items:
        if first <= seen[item.label] < stop:
            kept.append(item)
        seen[item.label] += 1
    return kept


def _check_masks_have_images(masks: Path, folder: Path, items: Sequence[Item]) -> None:
    """A mask without its image is an error: it would be overlooked."""
    if masks == folder or (masks / "index.csv").is_file():
        return
    used = {item.mask for item in items}
    for mask in sorted(masks.rglob("*.png")):
        expected = (folder / mask.relative_to(masks)).with_suffix("")
        exists = any(expected.with_suffix(suffix).is_file() for suffix in SUFFIXES)
        if mask not in used and not exists:
            raise BadInput(
                f"{mask} is a mask without an image: expected {expected}.jpg or another format. "
                "Remove it, or add the image."
            )


def check_masks(labelled: LabelledImages, on_progress: OnProgress = ignore_progress) -> None:
    """Check before the first step that every mask exists, decodes, has the size of its image and shows an
    object."""
    total = len(labelled.items)
    on_progress(Progress("check masks", 0, total, "masks"))
    for number, item in enumerate(labelled.items):
        if labelled.decode is not None and item.mask is not None:
            mask = read_mask(item, labelled.decode, image_size(item.source))
            check_mask_shows_object(mask, item, is_label_map=isinstance(labelled, SegmentationImages))
        on_progress(Progress("check masks", number + 1, total, "masks"))


def shows_object(mask: Image.Image, *, is_label_map: bool) -> bool:
    """Whether a mask has a pixel of the object, or a label map a pixel with a class."""
    extrema = mask.getextrema()
    return extrema[0] != IGNORED if is_label_map else OBJECT in extrema


def check_mask_shows_object(mask: Image.Image, item: Item, *, is_label_map: bool) -> None:
    if shows_object(mask, is_label_map=is_label_map):
        return
    reason = "has no pixel with a class" if is_label_map else "is background everywhere, without any object"
    raise BadImage(f"{item.mask}: the mask of {item.name} {reason}. Leave the image out.")
