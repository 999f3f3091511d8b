"""Rows as columns: texts as codes, values and details as arrays.

A row takes about 40 bytes and 8 for each number of its detail; as a dict it takes more than 1,000. Everything
that summarises runs (`verify.summary`, `stress.card`, `compare`, `store.Done`) reads columns.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from steadygaze.progress import OnProgress, Progress

TEXTS = ("model", "weights", "method", "score", "setting", "metric", "image", "note", "flag", "content")
CODED = (*TEXTS, "seed")
ABSENT = -1  # the code of a value that a row does not have


class Vocabulary(dict[Hashable, int]):
    """The distinct values of a column, numbered in order of arrival.

    >>> metrics = Vocabulary()
    >>> metrics["top1"], metrics["top5"], metrics["top1"], list(metrics)
    (0, 1, 0, ['top1', 'top5'])
    """

    def __missing__(self, value: Hashable) -> int:
        code = self[value] = len(self)
        return code

    def codes(self, values: Iterable[Hashable]) -> np.ndarray:
        """The code of each value; None is `ABSENT`."""
        return np.array([ABSENT if value is None else self[value] for value in values], dtype=np.int32)


Vocabularies = dict[str, Vocabulary]


def vocabularies() -> Vocabularies:
    """An empty vocabulary for each coded column."""
    return {name: Vocabulary() for name in CODED}


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows of one run or of several, in the order of the files.

    names: the distinct values of each coded column          codes: (n,) of each, `ABSENT` where there is none
    run: (n,) number of the run      value: (n,), NaN where it is undefined
    lengths: (n,) numbers in each detail, 0 without a detail      numbers: the details, one after the other
    unreadable: (run, image, reason) of images that could not be used; no reason: they can be used now
    """

    names: Vocabularies
    codes: Mapping[str, np.ndarray]
    run: np.ndarray
    value: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    unreadable: Sequence[tuple[int, str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.value)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Mapping[str, Any]]], names: Vocabularies | None = None) -> Columns:
        """The columns of checked (number of the run, line).

        >>> made = Columns.of([(0, {"metric": "top1", "image": "a", "value": 1, "detail": [3, 3]})])
        >>> made.text("metric").tolist(), made.value.tolist(), made.numbers.tolist()
        (['top1'], [1.0], [3.0, 3.0])
        """
        names = vocabularies() if names is None else names
        lines = list(rows)
        measured = [(run, row) for run, row in lines if "unreadable" not in row]
        details = [row.get("detail") or () for _, row in measured]
        return cls(
            names,
            {name: names[name].codes(row.get(name) for _, row in measured) for name in CODED},
            np.array([run for run, _ in measured], dtype=np.int16),
            np.array([row["value"] for _, row in measured], dtype=np.float64),
            np.array([len(detail) for detail in details], dtype=np.int32),
            np.array([number for detail in details for number in detail], dtype=np.float64),
            [(run, row["image"], row["unreadable"]) for run, row in lines if "unreadable" in row],
        )

    @classmethod
    def joined(cls, blocks: Iterable[Columns], names: Vocabularies) -> Columns:
        """One after the other; all have these vocabularies. Codes of few values are stored in fewer bytes."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*CODED, *_ARRAYS)}
        unreadable: list[tuple[int, str, str]] = []
        for block in blocks:
            for name in CODED:
                parts[name].append(block.codes[name].astype(_code_type(names[name]), copy=False))
            for name in _ARRAYS:
                parts[name].append(getattr(block, name))
            unreadable += block.unreadable
        empty = cls.of((), names)
        # one column at a time, so that no more than one column is held twice
        codes = {
            name: np.concatenate(
                parts.pop(name) or [empty.codes[name]], dtype=_code_type(names[name]), casting="unsafe"
            )
            for name in CODED
        }
        arrays = {name: np.concatenate(parts.pop(name) or [getattr(empty, name)]) for name in _ARRAYS}
        return cls(names, codes, **arrays, unreadable=unreadable)

    # -- texts -------------------------------------------------------------------------------------

    def values_of(self, name: str) -> np.ndarray:
        """The distinct values of a coded column, by code, and None at the end, where `ABSENT` leads."""
        out = np.empty(len(self.names[name]) + 1, dtype=object)
        out[:-1] = list(self.names[name])
        out[-1] = None
        return out

    def text(self, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The values of a coded column as objects, None where a row has none."""
        return self.values_of(name)[self.codes[name][rows]]

    def filled(self, name: str) -> np.ndarray:
        """(n,) whether a row has a text in this column that is not empty."""
        texts = np.array([bool(value) for value in self.values_of(name)])
        return texts[self.codes[name]]

    def distinct(self, name: str, rows: np.ndarray | slice = slice(None)) -> set[str]:
        """The texts of these rows in a column."""
        return set(self.values_of(name)[np.unique(self.codes[name][rows])])

    def among(self, name: str, chosen: Container[str], rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Whether each row has one of these texts in this column."""
        texts = np.array([value in chosen for value in self.values_of(name)])
        return texts[self.codes[name][rows]]

    # -- details -----------------------------------------------------------------------------------

    @cached_property
    def starts(self) -> np.ndarray:
        """(n,) where each detail begins in `numbers`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def details(self, rows: np.ndarray) -> np.ndarray:
        """The details of these rows, one after the other."""
        lengths = self.lengths[rows]
        shift = self.starts[rows] - (np.cumsum(lengths, dtype=np.int64) - lengths)
        return self.numbers[np.repeat(shift, lengths) + np.arange(lengths.sum(dtype=np.int64))]

    def detail_lists(self) -> Iterator[list[float] | None]:
        """Each row's detail as a list, or None."""
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield self.numbers[start : start + length].tolist() if length else None

    # -- rows --------------------------------------------------------------------------------------

    def take(self, rows: np.ndarray) -> Columns:
        """The rows of these positions, or where a mask is True; lines about unreadable images are kept."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        return Columns(
            self.names,
            {name: codes[rows] for name, codes in self.codes.items()},
            self.run[rows],
            self.value[rows],
            self.lengths[rows],
            self.details(rows),
            self.unreadable,
        )

    def of_images(self, images: Container[str]) -> Columns:
        """The rows and lines about these images."""
        rows = self.take(self.among("image", images))
        return replace(rows, unreadable=[line for line in self.unreadable if line[1] in images])

    def groups(self, columns: Sequence[str], rows: np.ndarray | None = None) -> Groups:
        """Rows (None: all) with the same values in these coded columns."""
        chosen: Any = slice(None) if rows is None else rows
        parts = [(self.codes[name][chosen], len(self.names[name])) for name in columns]
        return Groups.of(parts)


def counted(blocks: Iterable[Columns], on_progress: OnProgress, task: str = "reading") -> Iterator[Columns]:
    """Blocks as they are, with progress in rows."""
    done = 0
    on_progress(Progress(task, done, None, "rows"))
    for block in blocks:
        done += len(block)
        yield block
        on_progress(Progress(task, done, None, "rows"))


_ARRAYS = ("run", "value", "lengths", "numbers")


def _code_type(names: Vocabulary) -> type[np.signedinteger[Any]]:
    return np.int8 if len(names) < 2**7 else np.int16 if len(names) < 2**15 else np.int32


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows by group, groups in order of arrival.

    first: the first row of each group             of_row: (n,) the group of each row
    """

    first: np.ndarray
    of_row: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[tuple[np.ndarray, int]]) -> Groups:
        """Rows with the same codes in every part; a part has codes from -1 to its size - 1.

        >>> groups = Groups.of([(np.array([4, -1, 4]), 5)])
        >>> groups.first.tolist(), groups.of_row.tolist()
        ([0, 1], [0, 1, 0])
        """
        combined, size = np.zeros(len(parts[0][0]), dtype=np.int64), 1
        for codes, count in parts:
            combined, size = combined * (count + 1) + codes + 1, size * (count + 1)
            if (
                size > len(combined) + 2**20
            ):  # too many combinations for an array: number those that there are
                present, combined = np.unique(combined, return_inverse=True)
                size = len(present)
        first = np.full(size, -1, dtype=np.int64)
        first[combined[::-1]] = np.arange(len(combined))[::-1]
        there = np.flatnonzero(first >= 0)
        there = there[np.argsort(first[there])]
        number = np.empty(size, dtype=np.int16 if len(there) < 2**15 else np.int32)
        number[there] = np.arange(len(there))
        return cls(first[there], number[combined])

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.of_row, kind="stable")

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.searchsorted(self.of_row[self._order], np.arange(len(self) + 1))

    def rows(self, group: int) -> np.ndarray:
        """The rows of a group, in order."""
        return self._order[self._bounds[group] : self._bounds[group + 1]]
