"""Sets of pictures for k-NN in a stress run: a bank whose classes are known, and the pictures that are asked about.

The bank's features are never written: a run that is gone on with makes them again, and so does each of several processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from steadygaze.data.benchmarks import Pictures, PictureSet, picture_set
from steadygaze.data.folders import Item, evenly
from steadygaze.errors import BadInput
from steadygaze.runs.asked import digest
from steadygaze.runs.stress_data import Picture

SIDES = ("train", "test")


@dataclass(frozen=True)
class Entry(Item):
    """A picture of a set: its side, and its place there."""

    side: str = ""
    place: int = 0


@dataclass(frozen=True)
class Neighbours:
    """A set of classes of its own, with the pictures of the bank and those that are asked about."""

    name: str
    source: PictureSet
    bank: tuple[Picture, ...]
    asked: tuple[Picture, ...]
    ready: bool = False  # its pictures have no model's size

    def read(self, item: Item) -> Image.Image:
        assert isinstance(item, Entry)
        side = self.source.train if item.side == SIDES[0] else self.source.test
        return side[item.place]

    def facts(self) -> dict[str, Any]:
        """What defines its numbers."""
        both = digest(f"{p.name}\t{p.right[0]}" for p in (*self.bank, *self.asked))
        return {
            "name": self.name,
            "bank": len(self.bank),
            "pictures": len(self.asked),
            "hash": both,
            "classes": len(self.source.classes),
        }


def read_neighbours(name: str, folders: tuple[Path, ...], number: int, *, bank: int | None = None, limit: int | None = None,
                    partial: bool = False) -> Neighbours:  # fmt: skip
    """The set in these folders, at most `bank` and `limit` pictures of its sides, spread evenly over the classes.

    number: its place among all sets of the run that have pictures of their own
    """
    try:
        found = picture_set(name, *folders, partial=partial)
    except BadInput as error:
        raise BadInput(str(error).replace("partial=True", "--partial (partial=True)")) from error
    sides = []
    for side, pictures, most in zip(SIDES, (found.train, found.test), (bank, limit), strict=True):
        groups = [_entries(name, side, pictures, label) for label in range(len(found.classes))]
        chosen = evenly([group for group in groups if group])[:most]
        sides.append(tuple(Picture(entry.name, (int(entry.label or 0),), entry, number) for entry in chosen))
    return Neighbours(name, found, bank=sides[0], asked=sides[1])


def _entries(name: str, side: str, pictures: Pictures, label: int) -> list[Item]:
    made: list[Item] = []
    for place in np.flatnonzero(pictures.labels == label).tolist():
        source = pictures.sources[place]
        path = source if isinstance(source, Path) else Path(f"{place:06d}")
        called = f"{path.parent.name}/{path.name}" if isinstance(source, Path) else path.name
        made.append(Entry(f"{name}:{side}/{called}", path, label, None, side, place))
    return made


class Bank:
    """The features of a bank, as they come in."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, features: Float[Tensor, "b d"], labels: Int[Tensor, " b"]) -> None:
        if not torch.isfinite(features).all():
            raise BadInput(
                "neighbours: the model's features of the bank have NaN or infinite values, so nothing is near anything"
            )
        self._parts.append((features, labels))

    @property
    def whole(self) -> tuple[Float[Tensor, "m d"], Int[Tensor, " m"]]:
        """Features and labels."""
        if len(self._parts) != 1:
            self._parts = [(torch.cat([f for f, _ in self._parts]), torch.cat([y for _, y in self._parts]))]
        return self._parts[0]
