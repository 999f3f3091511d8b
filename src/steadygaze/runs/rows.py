"""The rows of a run: files in its folder, read back as dicts or as a table.

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

Files are parsed by pyarrow, some MiB at a time, into one pandas frame. A block that holds anything but plain
rows is read line by line instead: that reader defines what is accepted, and names the line that is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

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
    read_json,
)

TEXTS = ("model", "weights", "method", "score", "setting", "metric", "image", "note", "flag", "content")
CODED = (*TEXTS, "seed")  # columns with few distinct values, stored as categoricals
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in (*TEXTS, "unreadable")),
        ("seed", pa.int64()),
        ("value", pa.float64()),
        ("detail", pa.list_(pa.float64())),
    ]
)
Row = dict[str, Any]
Key = tuple[str, str, str, str]  # image and row key: what identifies a row in its run
_OF_A_VALUE = ("metric", "image", "value", "detail", "note", "flag", "seed", "content")
COLUMNS = ("model", "weights", "method", "score", *_OF_A_VALUE)
STRESS = "stress"  # the kind of run whose rows have a setting instead of method and score
RowKey = tuple[str, str, str]  # method, score (of a stress run: setting and nothing), metric
AT_ONCE = 2**16  # rows that are made into dicts at a time
KEY_COLUMNS = ("method", "setting", "score", "metric")  # the columns that make a row key


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows of one run or of several as a pandas frame, in the order of the files.

    Attributes:
        frame: The columns `run` (its number), `CODED` (categoricals, in order of arrival), `value` (NaN where
            it is undefined) and `detail` (Arrow lists of numbers, null without a detail).
        unreadable: (run, image, reason) of images that could not be used; no reason: they can be used now.
    """

    frame: pd.DataFrame
    unreadable: Sequence[tuple[int, str, str]]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Columns:
        """Make the columns of (number of the run, line).

        Examples:
            >>> rows = Columns.of([(0, {"metric": "top1", "image": "a", "value": 1, "detail": [3, 3]})])
            >>> rows.text("metric").tolist(), rows.value.tolist(), rows.lengths.tolist()
            (['top1'], [1.0], [2])
        """
        return cls.of_tables((run, table_of([dict(row)])) for run, row in rows)

    @classmethod
    def of_tables(
        cls,
        tables: Iterable[tuple[int, pa.Table]],
        on_progress: OnProgress = ignore_progress,
        *,
        details: bool = True,
    ) -> Columns:
        """Join (number of the run, lines as a table of `SCHEMA`); details: False leaves them out."""
        unreadable: list[tuple[int, str, str]] = []
        encoded = [_encoded(0, SCHEMA.empty_table())]
        done = 0
        on_progress(Progress("reading", done, None, "rows"))
        for run, table in tables:
            is_reason = pc.is_valid(table["unreadable"])
            if table["unreadable"].null_count < len(table):
                reasons = table.filter(is_reason)
                pairs = zip(reasons["image"].to_pylist(), reasons["unreadable"].to_pylist(), strict=True)
                unreadable += [(run, image, reason) for image, reason in pairs]
                table = table.filter(pc.invert(is_reason))
            if not details:
                nothing = pa.nulls(len(table), SCHEMA.field("detail").type)
                table = table.set_column(table.schema.get_field_index("detail"), "detail", nothing)
            encoded.append(_encoded(run, table))
            done += len(table)
            on_progress(Progress("reading", done, None, "rows"))
        joined = pa.concat_tables(encoded)
        del encoded
        data: dict[str, Any] = {}
        for name in joined.column_names:
            column, joined = joined[name], joined.drop_columns(name)  # freed when it is converted
            if name in CODED:
                merged = column.unify_dictionaries().combine_chunks()
                categories = pd.Index(merged.dictionary.to_pylist(), dtype=object)
                codes = merged.indices.fill_null(-1).to_numpy(zero_copy_only=False)
                data[name] = pd.Categorical.from_codes(codes, categories=categories)
            elif name == "detail":
                data[name] = pd.arrays.ArrowExtensionArray(column.combine_chunks())
            else:
                data[name] = column.to_numpy()
        return cls(pd.DataFrame(data, copy=False), unreadable)

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def run(self) -> np.ndarray:
        """(n,) number of the run of each row."""
        return self.frame["run"].to_numpy()

    @property
    def value(self) -> np.ndarray:
        """(n,) value of each row, NaN where it is undefined."""
        return self.frame["value"].to_numpy()

    @cached_property
    def codes(self) -> dict[str, np.ndarray]:
        """(n,) codes of each categorical column, -1 where a row has no value."""
        return {name: self.frame[name].array.codes for name in CODED}

    @cached_property
    def names(self) -> dict[str, dict[Hashable, int]]:
        """Value -> code of each categorical column."""
        return {
            name: {value: code for code, value in enumerate(self.frame[name].array.categories)}
            for name in CODED
        }

    def values_of(self, name: str) -> np.ndarray:
        """Return the distinct values of a categorical column by code, and None at the end, for code -1."""
        return np.append(self.frame[name].array.categories.to_numpy(dtype=object), [None])

    def text(self, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the values of a categorical column as objects, None where a row has none."""
        return self.values_of(name)[self.codes[name][rows]]

    def filled(self, name: str) -> np.ndarray:
        """(n,) whether a row has a text in this column that is not empty."""
        return np.array([bool(value) for value in self.values_of(name)])[self.codes[name]]

    def distinct(self, name: str, rows: np.ndarray | slice = slice(None)) -> set[str]:
        """Return the texts of these rows in a column."""
        return set(self.values_of(name)[np.unique(self.codes[name][rows])])

    def among(self, name: str, chosen: Container[str], rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Whether each row has one of these texts in this column."""
        return np.array([value in chosen for value in self.values_of(name)])[self.codes[name][rows]]

    @cached_property
    def _lists(self) -> pa.ListArray:
        chunks = self.frame["detail"].array.__arrow_array__()
        return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()  # which copies

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n,) how many numbers each detail has; 0 without a detail."""
        return pc.list_value_length(self._lists).fill_null(0).to_numpy(zero_copy_only=False)

    def details(self, rows: np.ndarray) -> np.ndarray:
        """Return the details of these rows, one after the other."""
        numbers = pc.list_flatten(self._lists.take(pa.array(rows)))
        return numbers.to_numpy(zero_copy_only=False).astype(np.float64)

    def detail_lists(self) -> list[list[float] | None]:
        """Return each row's detail as a list with NaN for undefined numbers, or None."""
        numbers = np.split(self.details(np.arange(len(self))), np.cumsum(self.lengths)[:-1])
        return [part.tolist() if len(part) else None for part in numbers] if len(self) else []

    def dicts(self) -> Iterator[Row]:
        """Iterate over the rows as dicts of JSON values, without the keys that a row does not have."""
        cells: dict[str, Iterable[Any]] = {name: self.text(name) for name in CODED}
        cells["value"] = map(json_number, self.value)
        details = self.detail_lists()
        cells["detail"] = (None if detail is None else list(map(json_number, detail)) for detail in details)
        names = (*COLUMNS[:4], "setting", *COLUMNS[4:])  # the order in which runs write them
        for row in zip(*(cells[name] for name in names), strict=True):
            yield {n: cell for n, cell in zip(names, row, strict=True) if cell is not None or n == "value"}

    def groups(self, columns: Sequence[str], rows: np.ndarray | None = None) -> Groups:
        """Group rows (None: all) with the same values in these categorical columns."""
        chosen: Any = slice(None) if rows is None else rows
        return Groups.of([self.codes[name][chosen] for name in columns])


def _encoded(run: int, table: pa.Table) -> pa.Table:
    """The rows of a table with categorical columns, and the number of their run."""
    coded = {name: table[name].dictionary_encode() for name in CODED}
    runs = pa.array(np.full(len(table), run, dtype=np.int16))
    return pa.table({"run": runs, **coded, "value": table["value"], "detail": table["detail"]})


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows by group, groups in order of arrival.

    Attributes:
        first: The first row of each group.
        of_row: (n,) the group of each row.
    """

    first: np.ndarray
    of_row: np.ndarray

    @classmethod
    def of(cls, codes: Sequence[np.ndarray]) -> Groups:
        """Group rows with the same codes, of one array or of several.

        Examples:
            >>> groups = Groups.of([np.array([4, -1, 4])])
            >>> groups.first.tolist(), groups.of_row.tolist()
            ([0, 1], [0, 1, 0])
        """
        frame = pd.DataFrame(dict(enumerate(codes)))
        of_row = frame.groupby(list(frame), sort=False).ngroup()
        return cls(np.flatnonzero(~of_row.duplicated()), of_row.to_numpy(dtype=np.int32))

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.of_row, kind="stable")
        return order, np.searchsorted(self.of_row[order], np.arange(len(self) + 1))

    def rows(self, group: int) -> np.ndarray:
        """Return the rows of a group, in order."""
        order, bounds = self._sorted
        return order[bounds[group] : bounds[group + 1]]


# -- files ---------------------------------------------------------------------------------------------


def row_key(row: Row) -> RowKey:
    """What identifies a row among the rows of its image."""
    return row.get("method") or row["setting"], row.get("score", ""), row["metric"]


def key_of(row: Row) -> Key:
    """What identifies a row in its run."""
    return row["image"], *row_key(row)


def json_number(x: Any) -> float | int | None:
    """A number as short as its precision allows; None where it is not finite, whole numbers as integers.

    Examples:
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
    try:
        return check_run(read_json(folder, "run.json"), str(folder / "run.json"))
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} is not a run folder: it has no run.json. Create one with verify or stress, "
            "with this folder as out."
        ) from error


def read_line(path: Path, number: int, line: bytes, check: Callable[[Any], None]) -> Row:
    """One line of a row file; InputError with its number if it is none.

    Args:
        check: Raises ValueError for a line that is none of this file.
    """
    try:
        row = parse_json(line)
        check(row)
    except ValueError as error:
        raise InputError(
            f"{path}, line {number}, is not a row ({error}). Delete that line; its batch is computed again."
        ) from error
    return dict(row)


def replaced_file(folder: Path, label: str) -> Path:
    """Where a process records images whose file changed since their rows were written."""
    return folder / f"replaced-{label}.jsonl"


def replacements(folder: Path) -> dict[str, tuple[int, str]]:
    """Images whose file changed during the run -> (how often, the content that counts)."""
    latest: dict[str, tuple[int, str]] = {}
    for path in _files(folder, "replaced-*.jsonl"):
        for number, line in enumerate(raw_lines(path), 1):
            mark = read_line(path, number, line, check_replacement)
            before = latest.get(mark["image"], (0, ""))
            latest[mark["image"]] = max(before, (mark["version"], mark["content"]))
    return latest


def every_file(path: Path) -> bool:
    """Want all files of rows."""
    return True


PARSED = 2 * 2**20  # bytes that one thread of pyarrow parses at a time


def run_tables(
    folder: Path, settings: Mapping[str, Any], wanted: Callable[[Path], bool] = every_file
) -> Iterator[pa.Table]:
    """Read the lines of a run with these settings, in tables of `SCHEMA` of some ten thousand lines each.

    Rows of image files that were replaced since are left out. wanted: which files of rows are read.
    """
    current = {image: content for image, (_, content) in replacements(folder).items()}
    for path in filter(wanted, row_files(folder)):
        line = 1
        for data in raw_blocks(path):
            table = _plain_rows(data, settings)
            if table is None:
                table = _line_by_line(path, line, data, settings)
            line += data.count(b"\n")
            if current:
                expected = pa.array([current.get(name) for name in table["image"].to_pylist()], pa.string())
                stale = pc.not_equal(expected, pc.fill_null(table["content"], ""))
                stale = pc.and_(pc.fill_null(stale, False), pc.is_null(table["unreadable"]))
                table = table.filter(pc.invert(stale))
            yield table


def _line_by_line(path: Path, first: int, data: bytes, settings: Mapping[str, Any]) -> pa.Table:
    check = partial(check_row, settings=settings)
    lines = enumerate(data.split(b"\n")[:-1], first)
    return table_of(read_line(path, number, line, check) for number, line in lines)


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Make a table of `SCHEMA` from checked lines; of those about unreadable images, image and reason."""
    reasons = ("image", "unreadable")
    lines = [{name: row[name] for name in reasons} if "unreadable" in row else row for row in rows]
    return pa.Table.from_pylist(lines, SCHEMA)


def _plain_rows(data: bytes, settings: Mapping[str, Any]) -> pa.Table | None:
    """Parse a block with pyarrow, if all of its lines are plain rows of this run; None otherwise."""
    count = data.count(b"\n")
    # together with flat values: no object spans lines, no line holds two
    if not (data.startswith(b"{") and data.endswith(b"}\n") and data.count(b"}\n{") == count - 1):
        return None
    try:
        data.decode("utf-8")
        table = arrow_json.read_json(
            pa.BufferReader(data),
            read_options=arrow_json.ReadOptions(block_size=PARSED),
            parse_options=arrow_json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="infer"),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    others = [table[name] for name in table.column_names if name not in SCHEMA.names]
    if len(table) != count or table["image"].null_count or not all(map(_is_flat, others)):
        return None
    rows = table.filter(pc.is_null(table["unreadable"])) if table["unreadable"].null_count < count else table
    numbers = pc.list_flatten(rows["detail"])
    written_nulls = rows["value"].null_count + numbers.null_count
    longest = pc.max(pc.list_value_length(rows["detail"])).as_py() or 0
    plain = (
        data.count(b"null") == written_nulls  # a value that is missing, or a text that is null, is refused
        and all(_every(pc.less_equal(pc.abs(column), LARGEST)) for column in (rows["value"], numbers))
        and longest <= MAX_DETAIL
        and not any(rows[name].null_count for name in _required(settings))
        and all(_every(pc.equal(rows[name], settings[name])) for name in MATCHING if name in settings)
    )
    return table.select(SCHEMA.names) if plain else None


def _required(settings: Mapping[str, Any]) -> tuple[str, ...]:
    if not settings:
        return ("metric",)
    return ("metric", "setting") if settings.get("kind") == STRESS else ("metric", "method", "score")


def _every(flags: pa.ChunkedArray) -> bool:
    """Whether all are true, nulls left out; NaN compares as false."""
    return bool(pc.all(flags, min_count=0).as_py())


def _is_flat(column: pa.ChunkedArray) -> bool:
    """Whether a column that rows need not have holds nothing that the reader of lines would refuse."""
    if pa.types.is_floating(column.type):
        return _every(pc.is_finite(column))
    return not pa.types.is_nested(column.type)


class Rows:
    """The rows of one run or of several. Iterating gives dicts; tables and cards are made from `columns()`.

    Attributes:
        folders: Of each run, the first if its shards were written into several.
        parts: All folders of each run.
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

    def _wanted(self, path: Path) -> bool:
        """Whether a file may hold rows of the shard that these rows are of."""
        return not self._shard or self._shard.may_hold_own(path)

    def _may_repeat(self, number: int) -> bool:
        """Whether an image of a run may have had two writers."""
        paths = self.parts[number]
        counts = {shard_of_file(path).count for folder in paths for path in row_files(folder)}
        return len(paths) > 1 or len(counts) > 1

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows as dicts, with the keys that each of them has."""
        if not self.parts:
            yield from (row for row in self._rows if "unreadable" not in row)
            return
        frame = self.columns().frame
        for start in range(0, len(frame), AT_ONCE):
            yield from Columns(frame.iloc[start : start + AT_ONCE], ()).dicts()

    def columns(self, on_progress: OnProgress = ignore_progress) -> Columns:
        """All rows as columns. They are kept until the files of the run change."""
        files = [len(self._rows), *(_state(folder) for folders in self.parts for folder in folders)]
        if self._read is None or self._read[0] != files:
            self._read = None
            columns = Columns.of_tables(self._tables(), on_progress)
            self._read = files, self._own(columns)
        return self._read[1]

    def _tables(self) -> Iterator[tuple[int, pa.Table]]:
        if self._rows:
            yield 0, table_of(self._rows)
        for number, folders in enumerate(self.parts):
            for folder in folders:
                for table in run_tables(folder, self.runs[number].get("settings", {}), self._wanted):
                    yield number, table

    def _own(self, columns: Columns) -> Columns:
        """The rows of this shard, each row once."""
        frame, unreadable = columns.frame, columns.unreadable
        if self._shard:
            frame = frame[columns.among("image", self._images)]
            unreadable = [line for line in unreadable if line[1] in self._images]
        repeating = [number for number in range(len(self.parts)) if self._may_repeat(number)]
        if repeating:
            again = frame.duplicated(["run", "image", *KEY_COLUMNS]) & frame["run"].isin(repeating)
            frame = frame[~again]
        return columns if frame is columns.frame else Columns(frame, unreadable)

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
        return self.frame(self.columns().frame)

    def frame(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Some of the rows of `columns().frame` as `to_pandas` gives them."""
        columns = Columns(rows, ())
        data: dict[str, Any] = {}
        for name in self.column_names:
            if name == "value":
                data[name] = columns.value
            elif name == "detail":
                data[name] = pd.Series(columns.detail_lists(), dtype=object)
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
        versions = (run["settings"]["versions"].items() for run in self.runs)
        return [", ".join(f"{name} {version}" for name, version in pairs) for pairs in versions]

    def to_parquet(
        self,
        path: str | Path,
        partition: str | None = None,
        *,
        on_progress: OnProgress = ignore_progress,
    ) -> Path:
        """Write the rows as a Parquet file.

        Args:
            partition: Method, setting or metric; `path` is then a folder with a file for each of its values.
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


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several runs as one result; in memory, with the settings of the first."""
    folders = [folder for part in parts for folder in part.folders]
    return Rows.read(*folders) if folders else Rows(parts[0].runs, [row for part in parts for row in part])


def _shards_of_one_run(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    sharded = all(run["about"].get("shards", 1) > 1 for run in (one, two))
    return bool(sharded and one["settings"] == two["settings"])


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Which row files there are, how long they are and when they were written."""
    paths = [*row_files(folder), *_files(folder, "replaced-*.jsonl")]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
