"""The rows of a run, read back from its folder or held in memory.

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
of method and score. A line with `unreadable` gives the reason why an image could not be used. Rows of the
first version have no content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import BadInput
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.runs.shards.keys import FirstRows, KeySet
from steadygaze.runs.shards.keys import RowKey as RowKey
from steadygaze.runs.shards.shard import WHOLE, Shard, shard_of_file
from steadygaze.runs.untrusted.json_files import inside, parse_json, raw_lines, read_bounded
from steadygaze.runs.untrusted.schema import check_replacement, check_row, check_run

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.columnar.columns import Columns, Vocabularies
    from steadygaze.runs.stress.card import Card
    from steadygaze.runs.verify.summary import Table

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
        raise BadInput(
            f"{folder} is not a run folder: it has no run.json. Create one with verify or stress, "
            "with this folder as out."
        ) from error
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({error})") from error


def read_line(path: Path, number: int, line: bytes, check: Callable[[Any], None]) -> Row:
    """One line of a row file; BadInput with its number if it is none.

    check: raises ValueError for a line that is none of this file
    """
    try:
        row = parse_json(line)
        check(row)
    except ValueError as error:
        raise BadInput(
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


def every_file(path: Path) -> bool:
    """All files of rows are wanted."""
    return True


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
            raise BadInput("expected at least one run folder, got none")
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
        from steadygaze.runs.columnar.columns import Columns, vocabularies

        names = vocabularies()
        if self._rows:
            yield Columns.of(((0, row) for row in self._rows), names)
        for number in range(len(self.parts)):
            yield from self._blocks(number, names)

    def _blocks(self, number: int, names: Vocabularies) -> Iterator[Columns]:
        """The rows of a run as columns, each row once."""
        from steadygaze.runs.columnar.blocks import run_blocks

        settings = self.runs[number].get("settings", {})
        known = FirstRows() if self._may_repeat(number) else None
        for folder in self.parts[number]:
            for block in run_blocks(folder, settings, names, number, wanted=self._wanted):
                own = block.of_images(self._images) if self._shard else block
                yield own if known is None else known.of(own)

    def columns(self, on_progress: OnProgress = ignore_progress) -> Columns:
        """All rows as columns. They are kept until the files of the run change."""
        from steadygaze.runs.columnar.columns import Columns, counted, vocabularies

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
        from steadygaze.runs.columnar.display import rows_text

        return rows_text(self)

    def _repr_html_(self) -> str:
        from steadygaze.runs.columnar.display import rows_html

        return rows_html(self)

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
        from steadygaze.runs.columnar.export import export_rows

        file = Path(path)
        if partition is None and file.suffix != ".parquet":
            raise BadInput(f"expected a file that ends in .parquet, got {file.name}")
        return export_rows(self, file, partition, on_progress)

    def table(self, *, repeats: int = 2000, seed: int = 0) -> Table:
        """The ranking: one value with its 95 % interval for each method, score and metric."""
        from steadygaze.runs.verify.summary import Table

        if STRESS in self.kinds:
            raise BadInput("expected rows of verify, got rows of a stress run: their numbers are in cards()")
        return Table.of(self, repeats=repeats, seed=seed)

    def cards(self, *, repeats: int = 2000, seed: int = 0) -> list[Card]:
        """The summary of each stress run: one value with its 95 % interval for each setting and metric, and
        the scores.
        """
        from steadygaze.runs.stress.card import Card

        return Card.of(self, repeats=repeats, seed=seed)


def _shards_of_one_run(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    sharded = all(run["about"].get("shards", 1) > 1 for run in (one, two))
    return bool(sharded and one["settings"] == two["settings"])


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Which row files there are, how long they are and when they were written."""
    paths = [*row_files(folder), *_files(folder, "replaced-*.jsonl")]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _versions_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
