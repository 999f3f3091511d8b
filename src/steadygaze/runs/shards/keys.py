"""Which rows of each image are there: one bit for each, so that millions of rows fit into memory."""

from __future__ import annotations

from collections.abc import Iterable

RowKey = tuple[str, str, str]  # method, score (of a stress run: setting and nothing), metric


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

    def has(self, image: str, key: RowKey) -> bool:
        """Whether this row is there."""
        return bool(self._rows.get(image, 0) & self._bit(key))

    def lacks(self, image: str, keys: Iterable[RowKey]) -> bool:
        """Whether any of these rows of an image is missing."""
        mask = self._mask(tuple(keys))
        return self._rows.get(image, 0) & mask != mask

    def forget(self, image: str) -> None:
        """Remove the rows of an image."""
        self._rows.pop(image, None)

    def _bit(self, key: RowKey) -> int:
        return 1 << self._bits.setdefault(key, len(self._bits))

    def _mask(self, keys: tuple[RowKey, ...]) -> int:
        if keys not in self._masks:
            self._masks[keys] = sum({self._bit(key) for key in keys})
        return self._masks[keys]
