"""From picture files (or pixels in memory) to what the model is shown: uint8, after resizing and cropping, before
normalisation. Runs in worker processes beside the model; a job is one batch of pictures under one condition."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import Decode, read_mask
from steadygaze.errors import BadImage, SteadygazeError
from steadygaze.loading.load import Loaded
from steadygaze.robustness.clips import FILMS, read_clip
from steadygaze.robustness.corruptions.corrupt import corrupt
from steadygaze.robustness.sequences import sequence
from steadygaze.robustness.shifts import Shift, Shifted
from steadygaze.robustness.synthetic import remove_background, square, swap_background, vary
from steadygaze.runs.stress_suite import Condition

Pixels = UInt8[np.ndarray, "h w 3"]
KEPT = 2  # batches of clean pictures that a worker remembers
GREY = 128


class PictureSource(Protocol):
    """A shift, or a set of neighbours: it reads its own pictures. ready: they have the model's size already."""

    @property
    def ready(self) -> bool: ...

    def read(self, item: Item) -> Image.Image: ...


@dataclass(frozen=True)
class Picture:
    """One picture of the run: its name in the rows, every class that is right, and where it comes from."""

    name: str
    right: tuple[int, ...]
    item: Item | None = None
    shift: int = -1  # which shift or set of neighbours, -1 for the data itself
    group: str = ""

    @classmethod
    def of(cls, item: Item) -> Picture:
        return cls(item.name, () if item.label is None else (item.label,), item)

    @classmethod
    def shifted(cls, item: Shifted, shift: Shift, number: int) -> Picture:
        return cls(f"{shift.name}:{item.name}", item.right, item, number, item.group)


@dataclass(frozen=True)
class Job:
    """Some pictures of one batch under one condition."""

    pictures: tuple[Picture, ...]
    condition: Condition


@dataclass(frozen=True)
class Made:
    """What a worker gives back: uint8 (B, V, 3, H, W), the places in the job that could be read, and why others could not; labels: the
    class of every pixel, (B, H, W), where it is asked for."""

    number: int
    images: Tensor | None
    places: tuple[int, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    labels: Tensor | None = None


def seed_of(seed: int, name: str) -> int:
    """The seed of one picture, by its name: the same in any order, batch and process."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:6], "big")


class Lens:
    """What the model sees of a picture, before normalisation: its own resizing and cropping."""

    def __init__(self, loaded: Loaded) -> None:
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

        self.size = loaded.size
        if hasattr(loaded.preprocess, "transforms"):
            steps = [
                s
                for s in loaded.preprocess.transforms
                if not type(s).__name__.endswith(("ToTensor", "ToNumpy", "Normalize"))
            ]
        else:
            recipe = loaded.recipe
            steps = [
                Resize(recipe["resize"], InterpolationMode(recipe["interpolation"])),
                CenterCrop(recipe["crop"]),
            ]
        self.whole = Compose(steps)
        self.margin = Compose([s for s in steps if not type(s).__name__.startswith("CenterCrop")])

    def pixels(self, picture: Image.Image, *, margin: bool = False) -> Pixels:
        """(H, W, 3); margin: not yet cropped."""
        return np.asarray((self.margin if margin else self.whole)(picture))


@dataclass
class Maker:
    """Makes the pictures of a job. memory: pixels by name, where the data is no folder; labels: label maps by name, the same.

    look: resizes and crops a label map as the model's pictures are; given, every picture comes with its map.
    """

    seed: int
    lens: Lens | None = None
    sets: Sequence[PictureSource] = ()
    memory: Mapping[str, Pixels] = field(default_factory=dict)
    decode: Decode | None = None
    backgrounds: tuple[Item, ...] = ()
    look: Callable[[Image.Image], Image.Image] | None = None
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    _clean: dict[str, Pixels | str] = field(default_factory=dict)
    _behind: dict[int, Pixels] = field(default_factory=dict)

    def __call__(self, number: int, job: Job) -> Made:
        good: list[np.ndarray] = []
        places: list[int] = []
        failed: dict[str, str] = {}
        try:
            for place, picture in enumerate(job.pictures):
                try:
                    good.append(self.make(picture, job.condition))
                    places.append(place)
                except BadImage as error:
                    failed[picture.name] = str(error)
        except SteadygazeError as error:  # is raised again where the run is, without the worker's own story
            return Made(number, None, error=error)
        if not good:
            return Made(number, None, failed=failed)
        stacked = torch.from_numpy(np.stack(good)).permute(0, 1, 4, 2, 3).contiguous()
        maps = [self.labels[job.pictures[place].name] for place in places] if self.labels else None
        return Made(
            number,
            stacked,
            tuple(places),
            failed,
            labels=None if maps is None else torch.from_numpy(np.stack(maps)),
        )

    def make(self, picture: Picture, condition: Condition) -> UInt8[np.ndarray, "v h w 3"]:
        """The pictures that the condition makes of one."""
        seed = seed_of(self.seed, picture.name)
        match condition.kind:
            case "corruption":
                return corrupt(self.clean(picture), condition.name, int(condition.level), seed=seed)[None]
            case "attention" if condition.name:
                clean = self.clean(picture)
                return np.stack([clean, corrupt(clean, condition.name, int(condition.level), seed=seed)])
            case "sequence":
                whole = (
                    self.clean(picture)
                    if self.lens is None
                    else self.lens.pixels(self.opened(picture), margin=True)
                )
                side = self.clean(picture).shape[0]
                return sequence(np.ascontiguousarray(whole), condition.name, seed=seed, size=side)
            case "clip":
                return self.clip(picture)
            case "synthetic" | "background":
                return self.synthetic(picture, condition, seed)
            case _:
                return self.clean(picture)[None]

    def clip(self, picture: Picture) -> UInt8[np.ndarray, "v h w 3"]:
        """The frames of a film as they are, if they have the model's size, as the published protocol wants."""
        assert picture.item is not None and self.lens is not None
        frames = read_clip(picture.item.path)
        if frames.shape[1:3] == self.lens.size:
            return frames
        return np.stack([self.lens.pixels(Image.fromarray(frame)) for frame in frames])

    def opened(self, picture: Picture) -> Image.Image:
        assert picture.item is not None
        return (
            read_image(picture.item.path)
            if picture.shift < 0
            else self.sets[picture.shift].read(picture.item)
        )

    def clean(self, picture: Picture) -> Pixels:
        """The picture as the model sees it; the last ones are remembered, for the next condition."""
        if self.lens is None:
            return self.memory[picture.name]
        found = self._clean.get(picture.name)
        if found is None:
            try:
                opened = self.opened(picture)
                width, height = opened.size
                ready = (
                    picture.shift >= 0
                    and self.sets[picture.shift].ready
                    and (height, width) == self.lens.size
                )
                found = np.ascontiguousarray(np.asarray(opened) if ready else self.lens.pixels(opened))
                if self.look is not None:
                    assert picture.item is not None and self.decode is not None
                    self.labels[picture.name] = np.array(
                        self.look(read_mask(picture.item, self.decode, opened.size))
                    )
            except BadImage as error:
                found = str(error)
            self._clean[picture.name] = found
        if isinstance(found, str):
            raise BadImage(found)
        return found

    def readable(self, picture: Picture) -> bool:
        """Whether a picture, and its mask where masks are used, can be read now."""
        try:
            if picture.item is not None and picture.item.path.suffix.lower() in FILMS:
                return bool(len(read_clip(picture.item.path)))
            opened = self.opened(picture)
            if self.decode is not None and picture.shift < 0 and picture.item is not None:
                read_mask(picture.item, self.decode, opened.size)
        except BadImage:
            return False
        return True

    def forget(self, keep: int) -> None:
        for name in list(self._clean)[:-keep]:
            del self._clean[name]
            self.labels.pop(name, None)

    def synthetic(self, picture: Picture, condition: Condition, seed: int) -> UInt8[np.ndarray, "v h w 3"]:
        assert picture.item is not None and self.decode is not None and self.lens is not None
        opened = self.opened(picture)
        image, mask = np.asarray(opened), np.asarray(read_mask(picture.item, self.decode, opened.size))
        if not (mask == 255).any():
            raise BadImage(f"{picture.item.mask}: no pixel is marked as object")
        side = self.lens.size[0]
        if condition.kind == "background" and condition.name == "removed":
            return self._seen(remove_background(image, mask))
        count = max(1, len(self.backgrounds))
        index = seed % count
        if condition.kind == "background":
            return self._seen(swap_background(image, mask, self.behind(index, side)))
        return np.stack(
            [
                made.picture
                for made in vary(
                    image, mask, [self.behind(index, side)], condition.name, seed=seed, side=side
                )
            ]
        )

    def _seen(self, made: Pixels) -> UInt8[np.ndarray, "1 h w 3"]:
        assert self.lens is not None
        return self.lens.pixels(Image.fromarray(made))[None]

    def behind(self, index: int, side: int) -> Pixels:
        if index not in self._behind:
            if self.backgrounds:
                self._behind[index] = square(np.asarray(read_image(self.backgrounds[index].path)), side)
            else:
                self._behind[index] = np.full((side, side, 3), GREY, np.uint8)
        return self._behind[index]


class _Jobs(torch.utils.data.Dataset):
    def __init__(self, jobs: Sequence[Job], maker: Maker) -> None:
        self.jobs, self.maker = jobs, maker

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, number: int) -> Made:
        made = self.maker(number, self.jobs[number])
        self.maker.forget(KEPT * max(1, len(self.jobs[number].pictures)))
        return made


def _same(made: Any) -> Any:
    return made


def made_ahead(jobs: Sequence[Job], maker: Maker, workers: int) -> Iterator[Made]:
    """Every job's pictures in order, made by `workers` processes ahead of who takes them; 0: made when taken."""
    if not jobs:
        return
    source = _Jobs(jobs, maker)
    if not workers:
        yield from (source[i] for i in range(len(jobs)))
        return
    more: dict[str, Any] = {"generator": torch.Generator()}  # or the global random state would be moved on
    if sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods():
        more["multiprocessing_context"] = "fork"  # starts at once; the workers touch no GPU
    loader = torch.utils.data.DataLoader(
        source,
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        collate_fn=_same,
        prefetch_factor=4,
        **more,
    )
    yield from loader


def free_cores(device: torch.device) -> int:
    """How many workers there should be if nobody says: all cores but one where the model is on a GPU, half of them on a CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores - 1 if device.type != "cpu" else cores // 2))
