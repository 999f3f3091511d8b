"""Rows as columns: texts as codes, values and details as arrays.

A row takes about 40 bytes and 8 for each number of its detail; as a dict it takes more than 1,000. Everything
that summarizes runs (`verify.summary`, `stress.card`, `compare`, `store.Done`) reads columns.

Which rows of each image are there: one bit for each, so that millions of rows fit into memory.

Row files as blocks of columns.

A block of some MiB is parsed and checked at once by pyarrow, if it is installed (extra `data`). A block that
holds anything but plain rows is read line by line: that reader defines what is accepted, and names the line
that is broken.

The rows of a run, read back from its folder or held in memory.

A folder RUN holds

| file | content |
| --- | --- |
| `run.json` | `settings`, which define the numbers, and `about`: the command and when it began |
| `rows-00000.jsonl` | one line a row, one file for each process; `.jsonl.gz` is read too |
| `rows-00003of00016-00000.jsonl` | the same, of shard 3 of 16 |
| `replaced-00000.jsonl` | only if image files changed before a run was resumed: the content that counts |
| `samples/` | images and maps for the report |

A row is one number: model, weights, method, score, metric, image, value, seed and content (a hash of the
image file); where they apply, detail (the curve or the sums behind the value), note (how it was measured) and
flag (the map was empty or broken). A run of `stress` has a setting (`clean`, `fog/3`, `fgsm/8`, ...) instead
of method and score. A line with `unreadable` gives the reason why an image could not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import InputError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.shards import WHOLE, Shard, shard_of_file
from steadygaze.runs.views import VIEWS
from steadygaze.untrusted import (
    LARGEST,
    MATCHING,
    MAX_DETAIL,
    check_replacement,
    check_row,
    check_run,
    inside,
    parse_json,
    raw_blocks,
    raw_lines,
    read_bounded,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

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


PARSED = 2 * 2**20  # bytes that one thread of pyarrow parses at a time


def every_file(path: Path) -> bool:
    """All files of rows are wanted."""
    return True


def run_blocks(
    folder: Path,
    settings: Mapping[str, Any],
    names: Vocabularies,
    run: int = 0,
    *,
    wanted: Callable[[Path], bool] = every_file,
    details: bool = True,
) -> Iterator[Columns]:
    """The rows of a run folder, without those of image files that were replaced since.

    wanted: which files of rows are read
    details: False leaves them out
    """
    replaced = {image: content for image, (_, content) in replacements(folder).items()}
    for path in filter(wanted, row_files(folder)):
        line = 1
        for data in raw_blocks(path):
            block = _parsed(data, settings, names, run, details)
            if block is None:
                block = _line_by_line(path, line, data, settings, names, run)
            line += data.count(b"\n")
            yield _current(block, replaced) if replaced else block


def _line_by_line(
    path: Path, first: int, data: bytes, settings: Mapping[str, Any], names: Vocabularies, run: int
) -> Columns:
    check = partial(check_row, settings=settings)
    lines = enumerate(data.split(b"\n")[:-1], first)
    return Columns.of(((run, read_line(path, number, line, check)) for number, line in lines), names)


def _current(block: Columns, replaced: Mapping[str, str]) -> Columns:
    """Without the rows of an earlier content of an image."""
    images, contents = block.names["image"], block.names["content"]
    expected = np.full(len(images) + 1, -2, dtype=np.int64)  # -2: any content counts
    for image, content in replaced.items():
        if image in images:
            expected[images[image]] = contents[content]
    wanted = expected[block.codes["image"]]
    stale = (wanted != -2) & (wanted != block.codes["content"])
    return block.take(~stale) if stale.any() else block


# -- the fast way ----------------------------------------------------------------------------------


def _parsed(
    data: bytes, settings: Mapping[str, Any], names: Vocabularies, run: int, details: bool
) -> Columns | None:
    """The block, if all of its lines are plain rows of this run; None: it has to be read line by line."""
    lines = data.count(b"\n")
    one_object_a_line = (
        data.startswith(b"{") and data.endswith(b"}\n") and data.count(b"}\n{") == lines - 1
    )  # together with flat values: no object spans lines, no line holds two
    if not one_object_a_line:
        return None
    table = _arrow_table(data)
    if table is None or len(table) != lines:
        return None
    nulls = data.count(b"null")
    unreadable, table = _unreadable(table, run)
    if unreadable is None:
        return None
    coded = {name: _coded(table[name], names[name]) for name in CODED}
    block = Columns(
        names,
        coded,
        np.full(len(table), run, dtype=np.int16),
        _numbers(table["value"]),
        *_detail_arrays(table["detail"]),
        unreadable,
    )
    written = table["value"].null_count + _null_numbers(table["detail"])
    if nulls != written or not _holds(block, table, settings):
        return None
    return block if details else _without_details(block)


def _arrow_table(data: bytes) -> pa.Table | None:
    try:
        import pyarrow as pa
        from pyarrow import json
    except ImportError:
        return None
    schema = pa.schema(
        [
            *((name, pa.string()) for name in (*TEXTS, "unreadable")),
            ("seed", pa.int64()),
            ("value", pa.float64()),
            ("detail", pa.list_(pa.float64())),
        ]
    )
    try:
        data.decode("utf-8")
        table = json.read_json(
            pa.BufferReader(data),
            read_options=json.ReadOptions(block_size=PARSED),
            parse_options=json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer"),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    plain = all(_is_plain(table[name]) for name in set(table.column_names) - set(schema.names))
    return table.combine_chunks() if plain else None


def _is_plain(column: pa.ChunkedArray) -> bool:
    """Whether a column that rows need not have holds nothing that the reader of lines would refuse."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return bool(pc.all(pc.is_finite(column)).as_py())
    return not pa.types.is_nested(column.type)


def _unreadable(table: pa.Table, run: int) -> tuple[list[tuple[int, str, str]] | None, pa.Table]:
    """The lines about unreadable images, and the table without them; None if one has no image."""
    import pyarrow.compute as pc

    column = table["unreadable"]
    if column.null_count == len(column):
        return [], table
    given = pc.is_valid(column)
    lines = table.select(["image", "unreadable"]).filter(given)
    if lines["image"].null_count:
        return None, table
    pairs = zip(lines["image"].to_pylist(), lines["unreadable"].to_pylist(), strict=True)
    return [(run, image, reason) for image, reason in pairs], table.filter(pc.invert(given)).combine_chunks()


def _coded(column: pa.ChunkedArray, names: Vocabulary) -> np.ndarray:
    encoded = column.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(ABSENT).to_numpy(zero_copy_only=False)
    known = np.append(names.codes(encoded.dictionary.to_pylist()), np.int32(ABSENT))
    return known[codes]


def _numbers(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    return np.array(column.to_numpy() if hasattr(column, "chunks") else column.to_numpy(False), np.float64)


def _detail_arrays(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.compute as pc

    lists = column.combine_chunks()
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int32), _numbers(lists.flatten())


def _null_numbers(column: pa.ChunkedArray) -> int:
    return int(column.combine_chunks().flatten().null_count)


def _holds(block: Columns, table: pa.Table, settings: Mapping[str, Any]) -> bool:
    """The result of `check_row` for every row."""
    own = ("setting",) if settings.get("kind") == "stress" else ("method", "score")
    required = ("image", "metric", *(own if settings else ()))
    if any((block.codes[name] == ABSENT).any() for name in required):
        return False
    for name in MATCHING:
        if name in settings:
            expected = block.names[name].get(settings[name], ABSENT)
            codes = block.codes[name]
            if not ((codes == expected) | (codes == ABSENT)).all():
                return False
    undefined = np.isnan(block.value).sum(), np.isnan(block.numbers).sum()
    if undefined != (table["value"].null_count, _null_numbers(table["detail"])):
        return False  # NaN, which is no number of JSON
    bounded = all(np.nanmax(np.abs(x), initial=0) <= LARGEST for x in (block.value, block.numbers))
    return bounded and block.lengths.max(initial=0) <= MAX_DETAIL


def _without_details(block: Columns) -> Columns:
    none = np.zeros(len(block), dtype=np.int32)
    return Columns(block.names, block.codes, block.run, block.value, none, np.empty(0), block.unreadable)


Row = dict[str, Any]
Key = tuple[str, str, str, str]  # image and row key: what identifies a row in its run
_OF_A_VALUE = ("metric", "image", "value", "detail", "note", "flag", "seed", "content")
COLUMNS = ("model", "weights", "method", "score", *_OF_A_VALUE)
STRESS = "stress"  # the kind of run whose rows have a setting instead of method and score


def row_key(row: Row) -> RowKey:
    """What identifies a row among the rows of its image."""
    return row.get("method") or row["setting"], row.get("score", ""), row["metric"]


def key_of(row: Row) -> Key:
    """What identifies a row in its run."""
    return row["image"], *row_key(row)


def json_number(x: Any) -> float | int | None:
    """A number as short as its precision allows; None where it is not finite, whole numbers as integers.

    >>> json_number(np.float32(0.1)), json_number(np.float32(2)), json_number(float("nan"))
    (0.1, 2, None)
    """
    if not np.isfinite(x):
        return None
    exact = float(str(x))  # the shortest text of a float32 is not that of the double of equal value
    return int(exact) if exact.is_integer() else exact


def row_files(folder: Path) -> list[Path]:
    """The row files in a run's folder, by process."""
    return _files(folder, "rows-*.jsonl", "rows-*.jsonl.gz")


def _files(folder: Path, *patterns: str) -> list[Path]:
    names = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    return [inside(folder, name) for name in names]


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a folder."""
    path = folder / "run.json"
    try:
        return check_run(parse_json(read_bounded(folder, path.name)), str(path))
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} is not a run folder: it has no run.json. Create one with verify or stress, "
            "with this folder as out."
        ) from error
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error


def read_line(path: Path, number: int, line: bytes, check: Callable[[Any], None]) -> Row:
    """One line of a row file; InputError with its number if it is none.

    check: raises ValueError for a line that is none of this file
    """
    try:
        row = parse_json(line)
        check(row)
    except ValueError as error:
        raise InputError(
            f"{path}, line {number}, is not a row ({error}). Delete that line; its batch is computed again."
        ) from error
    return dict(row)


def lines(path: Path, check: Callable[[Any], None]) -> Iterator[Row]:
    """The lines of one row file; an unfinished last line is left out, any other broken line is an error."""
    for number, line in enumerate(raw_lines(path), 1):
        yield read_line(path, number, line, check)


def replaced_file(folder: Path, label: str) -> Path:
    """Where a process records images whose file changed since their rows were written."""
    return folder / f"replaced-{label}.jsonl"


def replacements(folder: Path) -> dict[str, tuple[int, str]]:
    """Images whose file changed during the run -> (how often, the content that counts)."""
    latest: dict[str, tuple[int, str]] = {}
    for path in _files(folder, "replaced-*.jsonl"):
        for mark in lines(path, check_replacement):
            latest[mark["image"]] = max(
                latest.get(mark["image"], (0, "")), (mark["version"], mark["content"])
            )
    return latest


def valid_lines(
    folder: Path, settings: Mapping[str, Any], wanted: Callable[[Path], bool] = every_file
) -> Iterator[Row]:
    """The lines of a run with these settings, without the rows of files that were replaced since.

    wanted: which files of rows are read
    """
    current = {image: content for image, (_, content) in replacements(folder).items()}
    for path in filter(wanted, row_files(folder)):
        for row in lines(path, partial(check_row, settings=settings)):
            stale = "metric" in row and row.get("content") != current.get(row["image"], row.get("content"))
            if not stale:
                yield row


class Rows:
    """The rows of one run or of several. Iterating gives dicts, read anew each time; tables and cards are
    computed from `columns()`.

    folders: of each run, the first if its shards were written into several
    parts: all folders of each run
    """

    def __init__(
        self,
        runs: list[dict[str, Any]],
        rows: list[Row] | None = None,
        folders: list[Path] | None = None,
        parts: list[list[Path]] | None = None,
    ) -> None:
        self.runs = runs
        self.folders = folders or []
        self.parts = parts or [[folder] for folder in self.folders]
        self._rows = rows or []
        self._shard, self._images = WHOLE, frozenset[str]()
        self._read: tuple[Any, Columns] | None = None  # which files were read, and their columns

    @classmethod
    def read(cls, *folders: str | Path) -> Rows:
        """The rows of these run folders. Folders of shards of one run are that run."""
        if not folders:
            raise InputError("expected at least one run folder, got none")
        runs: list[dict[str, Any]] = []
        parts: list[list[Path]] = []
        for path in map(Path, folders):
            run = read_run(path)
            number = next((i for i, other in enumerate(runs) if _shards_of_one_run(run, other)), None)
            if number is None:
                runs.append(run)
                parts.append([path])
            elif path not in parts[number]:
                parts[number].append(path)
        return cls(runs, folders=[paths[0] for paths in parts], parts=parts)

    @classmethod
    def of_shard(cls, folder: Path, shard: Shard, images: Iterable[str]) -> Rows:
        """The rows of one shard, whose images these are."""
        rows = cls.read(folder)
        rows._shard, rows._images = shard, frozenset(images)
        return rows

    @property
    def shard(self) -> Shard:
        """The shard these rows are of; `WHOLE` for all rows of a folder."""
        return self._shard

    def everything(self) -> Iterator[tuple[int, Row]]:
        """(number of the run, line), including the lines about unreadable images."""
        for row in self._rows:
            yield 0, row
        for number in range(len(self.parts)):
            for row in self._lines(number):
                yield number, row

    def _lines(self, number: int) -> Iterator[Row]:
        """The lines of a run, each row once."""
        settings, paths = self.runs[number].get("settings", {}), self.parts[number]
        lines = (row for path in paths for row in valid_lines(path, settings, self._wanted))
        if self._shard:
            lines = (row for row in lines if row["image"] in self._images)
        if not self._may_repeat(number):
            yield from lines
            return
        known = KeySet()
        for row in lines:
            if "unreadable" in row or known.add(row["image"], row_key(row)):
                yield row

    def _wanted(self, path: Path) -> bool:
        """Whether a file may hold rows of the shard that these rows are of."""
        return not self._shard or self._shard.may_hold_own(path)

    def _may_repeat(self, number: int) -> bool:
        """Whether an image of a run may have had two writers."""
        paths = self.parts[number]
        counts = {shard_of_file(path).count for folder in paths for path in row_files(folder)}
        return len(paths) > 1 or len(counts) > 1

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.everything() if "unreadable" not in row)

    def blocks(self) -> Iterator[Columns]:
        """The rows as columns, some ten thousand at a time; all blocks share their vocabularies."""

        names = vocabularies()
        if self._rows:
            yield Columns.of(((0, row) for row in self._rows), names)
        for number in range(len(self.parts)):
            yield from self._blocks(number, names)

    def _blocks(self, number: int, names: Vocabularies) -> Iterator[Columns]:
        """The rows of a run as columns, each row once."""

        settings = self.runs[number].get("settings", {})
        known = FirstRows() if self._may_repeat(number) else None
        for folder in self.parts[number]:
            for block in run_blocks(folder, settings, names, number, wanted=self._wanted):
                own = block.of_images(self._images) if self._shard else block
                yield own if known is None else known.of(own)

    def columns(self, on_progress: OnProgress = ignore_progress) -> Columns:
        """All rows as columns. They are kept until the files of the run change."""

        files = [len(self._rows), *(_state(folder) for folders in self.parts for folder in folders)]
        if self._read is None or self._read[0] != files:
            self._read = None
            blocks = counted(self.blocks(), on_progress)
            first = next(blocks, None)
            names = vocabularies() if first is None else first.names
            self._read = files, Columns.joined(chain([] if first is None else [first], blocks), names)
        return self._read[1]

    def __len__(self) -> int:
        return len(self.columns())

    def __repr__(self) -> str:
        return VIEWS["text"](self)

    def _repr_html_(self) -> str:
        return VIEWS["html"](self)

    @property
    def kinds(self) -> set[str]:
        """What was run: "verify", "stress"."""
        return {run["settings"].get("kind", "verify") for run in self.runs}

    @property
    def unreadable(self) -> dict[str, str]:
        """Images that could not be used -> the reason."""
        reasons = {image: reason for _, image, reason in self.columns().unreadable}
        return {image: reason for image, reason in reasons.items() if reason}

    @property
    def flagged(self) -> dict[tuple[str, str], int]:
        """(method or setting, flag) -> number of maps that were empty or broken."""
        columns = self.columns()
        rows = np.flatnonzero(columns.filled("flag"))
        maps = columns.groups(["method", "setting", "flag", "score", "image"], rows)
        first = rows[maps.first]
        methods, settings, flags = (columns.text(name, first) for name in ("method", "setting", "flag"))
        counts: dict[tuple[str, str], int] = {}
        for method, setting, flag in zip(methods, settings, flags, strict=True):
            counts[method or setting, flag] = counts.get((method or setting, flag), 0) + 1
        return dict(sorted(counts.items()))

    def to_pandas(self) -> pd.DataFrame:
        """One line a row: model, weights, method and score (or setting), metric, image, value, detail, note,
        flag, seed, content, versions."""
        return self.frame(self.columns())

    def frame(self, columns: Columns) -> pd.DataFrame:
        """Some of the rows as `to_pandas` gives them."""
        import pandas as pd

        data: dict[str, Any] = {}
        for name in self.column_names:
            if name == "value":
                data[name] = columns.value
            elif name == "detail":
                data[name] = pd.Series(list(columns.detail_lists()), dtype=object)
            else:
                data[name] = columns.text(name).tolist()
        data["versions"] = np.array(self.versions, dtype=object)[columns.run].tolist()
        return pd.DataFrame(data).fillna({"note": "", "flag": "", "content": ""})

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of `to_pandas` and `to_parquet`, versions left out."""
        absent = {frozenset({STRESS}): ("method", "score"), frozenset({"verify"}): ("setting",)}
        left_out = absent.get(frozenset(self.kinds), ())
        return tuple(name for name in ("setting", *COLUMNS) if name not in left_out)

    @property
    def versions(self) -> list[str]:
        """The versions of the libraries of each run."""
        return [_versions_text(run["settings"]["versions"]) for run in self.runs]

    def to_parquet(
        self,
        path: str | Path,
        partition: str | None = None,
        *,
        on_progress: OnProgress = ignore_progress,
    ) -> Path:
        """Write the rows as a Parquet file; needs `pip install "steadygaze[data]"`.

        partition: method, setting or metric; `path` is then a folder with a file for each of its values
        """
        file = Path(path)
        if partition is None and file.suffix != ".parquet":
            raise InputError(f"expected a file that ends in .parquet, got {file.name}")
        return VIEWS["file"](self, file, partition, on_progress)

    def table(self, *, repeats: int = 2000, seed: int = 0) -> Any:
        """The ranking, a `runs.ranking.Table`: one value with its 95 % interval for each method, score and
        metric."""
        if STRESS in self.kinds:
            raise InputError(
                "expected rows of verify, got rows of a stress run: their numbers are in cards()"
            )
        return VIEWS["table"](self, repeats=repeats, seed=seed)

    def cards(self, *, repeats: int = 2000, seed: int = 0) -> list[Any]:
        """The summary of each stress run, a `runs.card.Card`: one value with its 95 % interval for each
        setting and metric, and the scores.
        """
        return VIEWS["cards"](self, repeats=repeats, seed=seed)


def _shards_of_one_run(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    sharded = all(run["about"].get("shards", 1) > 1 for run in (one, two))
    return bool(sharded and one["settings"] == two["settings"])


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Which row files there are, how long they are and when they were written."""
    paths = [*row_files(folder), *_files(folder, "replaced-*.jsonl")]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _versions_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
