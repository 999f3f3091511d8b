"""Rows as a file for other tools: Parquet (one file, or a folder partitioned by a column), CSV, JSON lines.

The schema of the Parquet file is documented in docs/rows.md. Rows are written in groups, so that memory does
not grow with the run, into a file or folder beside the target, which is renamed when it is complete.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.files import write_atomic
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.rows import ABSENT, TEXTS, Columns, counted

if TYPE_CHECKING:
    import pyarrow as pa

    from steadygaze.runs.rows import Rows

TASK = "export"
GROUP = 2**17  # rows of one row group
PARTITIONS = ("method", "setting", "metric")  # columns that a folder can be partitioned by
FORMAT = 1  # of the schema and the metadata
METADATA = "steadygaze"  # key of the file's metadata: format, and settings and about of each run
UNREADABLE = "steadygaze.unreadable"  # key: image -> reason, of images that could not be used
Write = Callable[["Rows", BinaryIO, OnProgress], None]


def export_rows(
    rows: Rows, path: Path, partition: str | None = None, on_progress: OnProgress = ignore_progress
) -> Path:
    """Write rows to a file whose format its name gives; partition: write a folder of Parquet files."""
    if partition is not None and partition not in PARTITIONS:
        raise InputError(
            f"expected {', '.join(PARTITIONS)} to partition by, got {partition}", option="partition"
        )
    try:
        if partition is not None:
            return _write_folder(rows, path, partition, on_progress)
        write = _writer(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomic(path, lambda file: write(rows, file, on_progress))
    except OSError as error:
        if isinstance(error, RowsNotWrittenError):
            raise
        raise RowsNotWrittenError(f"{path} could not be written: {error.strerror or error}") from error


def _writer(path: Path) -> Write:
    for ending, write in WRITERS.items():
        if path.name.endswith(ending):
            return write
    raise InputError(f"expected a file that ends in {', '.join(WRITERS)}, got {path.name}", option="to")


# -- Parquet ---------------------------------------------------------------------------------------


def need_pyarrow() -> None:
    """InputError unless pyarrow is installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise InputError('Parquet needs pyarrow: pip install "steadygaze[data]"') from error


def schema(plain: str | None = None) -> pa.Schema:
    """The columns of the Parquet file; plain: a text column that is not dictionary-encoded."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    fields = [(name, pa.string() if name == plain else text) for name in ("run", *TEXTS)]
    fields += [("value", pa.float64()), ("detail", pa.list_(pa.float64())), ("seed", pa.int64())]
    return pa.schema([*fields, ("versions", text)])


def _table(rows: Rows, block: Columns, plain: str | None = None) -> pa.Table:
    import pyarrow as pa

    runs = [str(folder) for folder in rows.folders] or [""] * len(rows.runs)
    columns: dict[str, Any] = {
        "run": _encoded(block.run, runs),
        "versions": _encoded(block.run, rows.versions),
    }
    for name in TEXTS:
        columns[name] = _encoded(block.codes[name], list(block.names[name]))
    columns["value"] = pa.array(block.value, from_pandas=True)
    offsets = pa.array(
        np.append(0, np.cumsum(block.lengths)).astype(np.int32), mask=np.append(block.lengths == 0, False)
    )
    columns["detail"] = pa.ListArray.from_arrays(offsets, pa.array(block.numbers, from_pandas=True))
    seeds = block.text("seed")
    columns["seed"] = pa.array(seeds.tolist(), type=pa.int64())
    own = schema(plain)
    return pa.table({name: columns[name].cast(own.field(name).type) for name in own.names}, schema=own)


def _encoded(codes: np.ndarray, names: list[Any]) -> pa.DictionaryArray:
    """Texts by code, with the texts of these rows only."""
    import pyarrow as pa

    present, local = np.unique(codes, return_inverse=True)
    there = present != ABSENT
    shift = int((~there).sum())
    texts = pa.array([names[code] for code in present[there]], type=pa.string())
    indices = pa.array((local - shift).astype(np.int32), mask=codes == ABSENT)
    return pa.DictionaryArray.from_arrays(indices, texts)


def _metadata(rows: Rows) -> dict[str, str]:
    folders = [str(folder) for folder in rows.folders] or [""] * len(rows.runs)
    runs = [{"run": name, **run} for name, run in zip(folders, rows.runs, strict=True)]
    return {METADATA: json.dumps({"format": FORMAT, "runs": runs}, ensure_ascii=False)}


def _groups(rows: Rows, on_progress: OnProgress, unreadable: dict[str, str], plain: str | None = None) -> Any:
    """Tables of about `GROUP` rows; fills `unreadable`."""
    import pyarrow as pa

    held: list[pa.Table] = []
    for block in counted(rows.blocks(), on_progress, TASK):
        unreadable.update({image: reason for _, image, reason in block.unreadable})
        if len(block):
            held.append(_table(rows, block, plain))
        if sum(map(len, held)) >= GROUP:
            yield pa.concat_tables(held).unify_dictionaries().combine_chunks()
            held = []
    if held:
        yield pa.concat_tables(held).unify_dictionaries().combine_chunks()


def _write_parquet(rows: Rows, file: BinaryIO, on_progress: OnProgress) -> None:
    need_pyarrow()
    import pyarrow.parquet as pq

    unreadable: dict[str, str] = {}
    own = schema().with_metadata(_metadata(rows))
    with pq.ParquetWriter(file, own, compression="zstd") as writer:
        for table in _groups(rows, on_progress, unreadable):
            writer.write_table(table.replace_schema_metadata(own.metadata), row_group_size=GROUP)
        writer.add_key_value_metadata({UNREADABLE: _reasons(unreadable)})


def _reasons(unreadable: dict[str, str]) -> str:
    return json.dumps({image: reason for image, reason in unreadable.items() if reason}, ensure_ascii=False)


def _write_folder(rows: Rows, path: Path, partition: str, on_progress: OnProgress) -> Path:
    """FOLDER/method=NAME/part-0.parquet, and what was run in FOLDER/_runs.json."""
    need_pyarrow()
    import pyarrow as pa
    import pyarrow.dataset as ds

    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists: choose another folder, or delete it first", option="to")
    path.parent.mkdir(parents=True, exist_ok=True)
    unreadable: dict[str, str] = {}
    own = schema(plain=partition).with_metadata(_metadata(rows))
    tables = _groups(rows, on_progress, unreadable, plain=partition)
    batches = (batch for table in tables for batch in _complete(table, partition).to_batches())
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".part"))
    try:
        ds.write_dataset(
            (batch.cast(own) for batch in batches),
            folder,
            schema=own,
            format="parquet",
            file_options=ds.ParquetFileFormat().make_write_options(compression="zstd"),
            partitioning=ds.partitioning(pa.schema([own.field(partition)]), flavor="hive"),
            basename_template="part-{i}.parquet",
            max_rows_per_group=GROUP,
            min_rows_per_group=GROUP // 8,
            existing_data_behavior="overwrite_or_ignore",
        )
        about = {**json.loads(_metadata(rows)[METADATA]), "unreadable": json.loads(_reasons(unreadable))}
        write_atomic(folder / "_runs.json", json.dumps(about, ensure_ascii=False, indent=2))
        folder.chmod(0o755)
        folder.replace(path)
    except pa.ArrowInvalid as error:  # more values than a folder should hold
        raise InputError(
            f"the rows cannot be partitioned by {partition}: {error}", option="partition"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _complete(table: pa.Table, partition: str) -> pa.Table:
    if table[partition].null_count:
        raise InputError(
            f"expected rows with a {partition}, got rows without one: runs of verify have methods, runs of "
            "stress have settings",
            option="partition",
        )
    return table


# -- text ------------------------------------------------------------------------------------------


def _write_csv(rows: Rows, file: BinaryIO, on_progress: OnProgress) -> None:
    header = True
    for block in counted(rows.blocks(), on_progress, TASK):
        frame = rows.frame(block)
        frame["detail"] = ["" if detail is None else json.dumps(detail) for detail in frame["detail"]]
        file.write(frame.to_csv(index=False, header=header, lineterminator="\n").encode())
        header = False


def _write_lines(rows: Rows, file: BinaryIO, on_progress: OnProgress) -> None:
    with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed, io.TextIOWrapper(packed, "utf-8") as text:
        for done, (_, row) in enumerate(rows.everything(), 1):
            text.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")
            if done % GROUP == 0:
                on_progress(Progress(TASK, done, None, "rows"))


WRITERS: dict[str, Write] = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl.gz": _write_lines}
