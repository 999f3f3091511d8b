"""Which rows of each image are there: one bit for each, so that millions of rows fit into memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from steadygaze.runs.columnar.columns import Columns

RowKey = tuple[str, str, str]  # method, score (of a stress run: setting and nothing), metric
PARTS = ("method", "setting", "score", "metric")  # the columns that make a row key
SLICE = 2**25  # images x row keys that are looked at together


class KeySet:
    """A set of (image, row key)."""

    def __init__(self) -> None:
        self._bits: dict[RowKey, int] = {}
        self._rows: dict[str, int] = {}  # image -> bits of its rows
        self._masks: dict[tuple[RowKey, ...], int] = {}

    def add(self, image: str, key: RowKey) -> bool:
        """Add a row; False if it was there."""
        before, bit = self._rows.get(image, 0), self._bit(key)
        self._rows[image] = before | bit
        return not before & bit

    def add_columns(self, rows: Columns) -> None:
        """Add all of these rows to an empty set."""
        if not len(rows):
            return
        groups = rows.groups(PARTS)
        texts = zip(*(rows.text(name, groups.first) for name in PARTS), strict=True)
        numbers = np.array([self._number((m or s, score or "", metric)) for m, s, score, metric in texts])
        names, images = rows.values_of("image")[:-1], rows.codes["image"]
        step = max(1, SLICE // len(self._bits))
        for first in range(0, len(names), step):
            own = np.flatnonzero((images >= first) & (images < first + step))
            there = np.zeros((min(step, len(names) - first), len(self._bits)), dtype=bool)
            there[images[own] - first, numbers[groups.of_row[own]]] = True
            bits = np.packbits(there, axis=1, bitorder="little")
            for offset in np.flatnonzero(there.any(1)):
                self._rows[names[first + offset]] = int.from_bytes(bits[offset].tobytes(), "little")

    def has(self, image: str, key: RowKey) -> bool:
        """Whether this row is there."""
        return bool(self._rows.get(image, 0) & self._bit(key))

    def lacks(self, image: str, keys: Iterable[RowKey]) -> bool:
        """Whether any of these rows of an image is missing."""
        mask = self._mask(tuple(keys))
        return self._rows.get(image, 0) & mask != mask

    def count(self, image: str, keys: Iterable[RowKey]) -> int:
        """How many of these rows of an image are there."""
        return (self._rows.get(image, 0) & self._mask(tuple(keys))).bit_count()

    def forget(self, image: str) -> None:
        """Remove the rows of an image."""
        self._rows.pop(image, None)

    def _bit(self, key: RowKey) -> int:
        return 1 << self._number(key)

    def _number(self, key: RowKey) -> int:
        return self._bits.setdefault(key, len(self._bits))

    def _mask(self, keys: tuple[RowKey, ...]) -> int:
        if keys not in self._masks:
            self._masks[keys] = sum({self._bit(key) for key in keys})
        return self._masks[keys]


class FirstRows:
    """Of rows that come in blocks with the same vocabularies, the first of each image and row key."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._seen = np.zeros((0, 0), dtype=bool)  # images x row keys

    def of(self, block: Columns) -> Columns:
        """The block without rows that came before."""
        if not len(block):
            return block
        rows = block.groups(("image", *PARTS)).first
        keys = block.groups(PARTS, rows)
        codes = zip(*(block.codes[name][rows[keys.first]].tolist() for name in PARTS), strict=True)
        numbers = np.array([self._numbers.setdefault(key, len(self._numbers)) for key in codes])
        where = block.codes["image"][rows], numbers[keys.of_row]
        self._grow(len(block.names["image"]), len(self._numbers))
        new = ~self._seen[where]
        self._seen[where] = True
        return block if new.sum() == len(block) else block.take(np.sort(rows[new]))

    def _grow(self, images: int, keys: int) -> None:
        known_images, known_keys = self._seen.shape
        if images > known_images or keys > known_keys:
            seen = np.zeros((max(images, 2 * known_images), max(keys, known_keys)), dtype=bool)
            seen[:known_images, :known_keys] = self._seen
            self._seen = seen
