"""Pictures for training: found, read, augmented (timm's RandAugment, random erasing), with masks that move along.

Whatever is drawn at random is drawn from (seed, epoch, picture) or (seed, step): not from a state that a killed run would lose, nor
from how many processes or workers there are.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from steadygaze.data.confusion import IGNORED
from steadygaze.data.folders import Classes, Item
from steadygaze.data.images import SUFFIXES, read_image, size_of
from steadygaze.data.label_maps import Segmented, find_maps
from steadygaze.data.masks import OBJECT, Decode, Labelled, find, read_mask
from steadygaze.errors import BadImage, BadInput
from steadygaze.training.rand_augment import rand_augment
from steadygaze.training.recipe import Augment, Data

log = logging.getLogger(__name__)
T = TypeVar("T")
MASK = 0xFFFFFFFF
TRIES = 10  # crops that are drawn until the object is in one


def seed_from(*numbers: int) -> int:
    """One 32-bit seed of several numbers; neighbours give unlike seeds."""
    return int(np.random.SeedSequence([n & MASK for n in numbers]).generate_state(1)[0])


@contextmanager
def drawn_from(*numbers: int, devices: bool = True) -> Iterator[None]:
    """Everything random inside (python's, numpy's, torch's) follows from these numbers; outside, it goes on as if nothing had been.

    devices: GPUs, too; not for each picture, since torch notes the stack of every such seed until a GPU is used.
    """
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - timm draws from the global one
    seed = seed_from(*numbers)
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if devices and torch.cuda.is_initialized() else []
    ):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


# -- finding --------------------------------------------------------------------------------------------------------


def class_names(folder: str) -> tuple[str, ...] | None:
    """The names of a folder's class folders, in order: what the classes of a new classifier are called."""
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(
            f"data.train: expected a folder of pictures, got {folder!r}: {'a file' if root.exists() else 'no such folder'}"
        )
    if (root / "index.csv").is_file():
        return None
    return tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))


def find_pictures(data: Data, part: str, classes: Classes | None, masks: str | None) -> Labelled:
    """The labelled pictures that a recipe asks for, to train ("train") or to test with ("test"); without classes, pictures with label
    maps."""
    prefix = "test_" if part == "test" else ""
    folder, only, span, each = (
        getattr(data, name) for name in (part, f"{prefix}only", f"{prefix}classes", f"{prefix}pictures")
    )
    found = find_maps(folder, masks, part) if classes is None else find(folder, masks, classes)
    items = [item for item in found.items if item.label is not None]
    if masks is not None:
        _orphans(Path(masks), Path(folder), items)
    for item in items:
        if not item.path.is_file():
            raise BadInput(
                f"data.{part}: {item.path} is listed{', with a mask,' if item.mask else ''} but is not there"
            )
    if only is not None and classes is not None:
        wanted = {classes.index(text) for text in only}
        items = [item for item in items if item.label in wanted]
    if span is not None:
        first, stop = _span(span, f"data.{prefix}classes")
        chosen = set(sorted({item.label for item in items if item.label is not None})[first:stop])
        items = [item for item in items if item.label in chosen]
    if each is not None:
        first, stop = _span(each, f"data.{prefix}pictures")
        counted: Counter[int | None] = Counter()
        kept = []
        for item in items:
            if first <= counted[item.label] < stop:
                kept.append(item)
            counted[item.label] += 1
        items = kept
    if not items:
        raise BadInput(f"data.{part}: no picture of {folder} is left by what the recipe asks for")
    return replace(found, items=items)


def check_masks(found: Labelled) -> None:
    """Every mask is there, decodes, has its picture's size and shows an object: said before the first step, not in the middle of a run."""
    for item in told(found.items, "masks looked at"):
        if found.decode is not None and item.mask is not None:
            _check_shown(
                read_mask(item, found.decode, size_of(item.path)), item, isinstance(found, Segmented)
            )


def _shows(mask: Image.Image, maps: bool) -> bool:
    """Whether a mask shows an object, or a label map a pixel that counts."""
    return mask.getextrema()[0] != IGNORED if maps else OBJECT in mask.getextrema()


def _check_shown(mask: Image.Image, item: Item, maps: bool) -> None:
    if _shows(mask, maps):
        return
    why = "has no pixel whose class counts" if maps else "is background everywhere: nothing to look at"
    raise BadImage(f"{item.mask}: the mask of {item.name} {why}. Leave the picture out.")


def told(things: Sequence[T], what: str, every: float = 5.0) -> Iterator[T]:
    """The things, one by one; where they take long, the log says how far it is."""
    last = time.monotonic()
    for number, thing in enumerate(things):
        if time.monotonic() - last > every:
            last = time.monotonic()
            log.info("%s: %d of %d", what, number, len(things))
        yield thing


def _span(given: Sequence[int], key: str) -> tuple[int, int]:
    if len(given) != 2 or not 0 <= given[0] < given[1]:
        raise BadInput(f"{key}: expected [first, stop], for example [0, 3], got {list(given)}")
    return given[0], given[1]


def _orphans(masks: Path, folder: Path, items: Sequence[Item]) -> None:
    """A mask in a folder of masks whose picture is missing is a slip that would go unseen."""
    if masks == folder or (masks / "index.csv").is_file():
        return
    used = {item.mask for item in items}
    for mask in sorted(masks.rglob("*.png")):
        beside = (folder / mask.relative_to(masks)).with_suffix("")
        if mask not in used and not any(beside.with_suffix(end).is_file() for end in SUFFIXES):
            raise BadInput(
                f"{mask} is a mask without its picture: expected {beside}.jpg or the like. Remove it, or bring the picture."
            )


# -- one picture ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How the model wants its pictures."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float  # share of the shorter side that a test crop keeps

    @classmethod
    def of(cls, model_config: dict[str, Any], data: Data) -> Shape:
        own = model_config
        size = (data.size, data.size) if data.size else tuple(own["input_size"][1:])
        words = data.interpolation or own.get("interpolation") or "bicubic"
        return cls(
            size,
            tuple(data.mean or own["mean"]),
            tuple(data.std or own["std"]),
            words,
            data.crop or own.get("crop_pct") or 1.0,
        )


class Pictures(Dataset):
    """(epoch, place) -> image (3, H, W), label, mask (H, W) uint8 or nothing; `epoch` None: as in testing.

    Of pictures with label maps (`classes` of them, else 0), the label is the map, (H, W).
    """

    def __init__(
        self,
        found: Labelled,
        shape: Shape,
        augment: Augment,
        seed: int,
        made: dict[str, Tensor] | None = None,
    ) -> None:
        self.items, self.decode, self.shape, self.augment, self.seed, self.made = (
            found.items,
            found.decode,
            shape,
            augment,
            seed,
            made,
        )
        self.classes = found.classes if isinstance(found, Segmented) else 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Tensor, int | Tensor, Tensor]:
        epoch, place = key
        item = self.items[place]
        picture, mask = read_pair(item, self.decode, self.made, bool(self.classes))
        if epoch is None:
            image, seen = self.tested(picture, mask)
        else:
            with drawn_from(self.seed, 1, epoch, place, devices=False):
                image, seen = self.augmented(picture, mask)
        if self.classes:
            assert seen is not None
            return image, seen.long(), torch.empty(0, dtype=torch.uint8)
        assert item.label is not None
        return image, item.label, torch.empty(0, dtype=torch.uint8) if seen is None else seen

    @cached_property
    def finish(self) -> Any:
        from torchvision.transforms import Compose, Normalize, ToTensor

        return Compose([ToTensor(), Normalize(list(self.shape.mean), list(self.shape.std))])

    @cached_property
    def paint(self) -> Any:
        """What changes pixels: colour jitter, and timm's RandAugment (which moves them too: never with masks)."""
        from torchvision.transforms import ColorJitter, Compose

        a, steps = self.augment, []
        if a.color_jitter:
            steps.append(ColorJitter(a.color_jitter, a.color_jitter, a.color_jitter))
        if a.rand_augment:
            steps.append(rand_augment(a.rand_augment, self.shape.mean, min(self.shape.size)))
        return Compose(steps)

    @cached_property
    def erase(self) -> Any:
        from timm.data.random_erasing import RandomErasing

        return RandomErasing(self.augment.erase, mode="pixel", max_count=1, device="cpu")

    def augmented(self, picture: Image.Image, mask: Image.Image | None) -> tuple[Tensor, Tensor | None]:
        for _ in range(TRIES if mask is not None else 1):
            state = random.getstate(), torch.get_rng_state()
            seen = None if mask is None else self.cropped(mask, nearest=True)
            if seen is None or _shows(seen, bool(self.classes)):
                break
        else:
            return self.tested(picture, mask)
        if mask is not None:  # the same draws again, for the picture
            random.setstate(state[0])
            torch.set_rng_state(state[1])
        image = self.finish(self.paint(self.cropped(picture)))
        return self.erase(image) if self.augment.erase else image, None if seen is None else codes(seen)

    def cropped(self, picture: Image.Image, nearest: bool = False) -> Image.Image:
        from torchvision.transforms import RandomCrop, RandomResizedCrop
        from torchvision.transforms import functional as F

        a, size, how = self.augment, list(self.shape.size), self.how(nearest)
        if a.crop == "resized":
            box = RandomResizedCrop.get_params(picture, a.scale, a.ratio)
            picture = F.resized_crop(picture, *box, size, how)
        elif a.crop == "none":
            picture = self.centred(picture, nearest)
        else:
            if a.crop == "resize":
                picture = F.resize(picture, [a.resize, a.resize], how)
            else:
                whole = F.resize(picture, size, how) if picture.size != (size[1], size[0]) else picture
                picture = F.pad(whole, [a.pad] * 4, fill=IGNORED if nearest and self.classes else 0)
            picture = F.crop(picture, *RandomCrop.get_params(picture, (size[0], size[1])))
        return F.hflip(picture) if torch.rand(()).item() < a.flip else picture

    def tested(self, picture: Image.Image, mask: Image.Image | None) -> tuple[Tensor, Tensor | None]:
        return self.finish(self.centred(picture)), None if mask is None else codes(
            self.centred(mask, nearest=True)
        )

    def centred(self, picture: Image.Image, nearest: bool = False) -> Image.Image:
        from torchvision.transforms import functional as F

        height, width = self.shape.size
        if picture.size == (width, height) and self.shape.crop == 1:
            return picture
        sides = [int(height / self.shape.crop), int(width / self.shape.crop)]
        if height == width:
            return F.center_crop(F.resize(picture, sides[:1], self.how(nearest)), [height, width])
        from timm.data.transforms import ResizeKeepRatio

        resized = ResizeKeepRatio(
            sides, interpolation="nearest" if nearest else "bilinear"
        )  # as timm does it, whatever the model's own
        return F.center_crop(resized(picture), [height, width])

    def how(self, nearest: bool) -> Any:
        from torchvision.transforms import InterpolationMode

        return InterpolationMode.NEAREST if nearest else InterpolationMode(self.shape.interpolation)


def read_pair(item: Item, decode: Decode | None, made: dict[str, Tensor] | None = None,
              maps: bool = False) -> tuple[Image.Image, Image.Image | None]:  # fmt: skip
    """A picture and its mask, or label map; a mask without any object, or a map without any class, is refused."""
    picture = read_image(item.path)
    if made is not None:
        return picture, Image.fromarray(made[item.name].numpy()).resize(
            picture.size, Image.Resampling.NEAREST
        )
    if decode is None or item.mask is None:
        return picture, None
    mask = read_mask(item, decode, picture.size)
    _check_shown(mask, item, maps)
    return picture, mask


def codes(mask: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(mask, dtype=np.uint8))
