"""Rows as a file for other tools: Parquet (one file, or a folder partitioned by a column), CSV, JSON lines.

The schema of the Parquet file is documented in docs/rows.md. A file or folder beside the target is written,
and renamed when it is complete.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.files import make_parent, write_atomic
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.rows import TEXTS
from steadygaze.runs.statistics import csv_text

if TYPE_CHECKING:
    import pandas as pd

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
        make_parent(path, option="to")
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


def schema(plain: str | None = None) -> pa.Schema:
    """Return the columns of the Parquet file; plain: a text column that is not dictionary-encoded."""
    text = pa.dictionary(pa.int32(), pa.string())
    fields = [(name, pa.string() if name == plain else text) for name in ("run", *TEXTS)]
    fields += [("value", pa.float64()), ("detail", pa.list_(pa.float64())), ("seed", pa.int64())]
    return pa.schema([*fields, ("versions", text)])


def _tables(rows: Rows, on_progress: OnProgress, plain: str | None = None) -> Iterator[pa.Table]:
    """Tables of `GROUP` rows."""
    own, folders = schema(plain), pa.array(_folders(rows), pa.string())
    for part in _parts(rows, on_progress):
        runs = pa.array(part["run"].to_numpy(np.int32))
        columns: dict[str, Any] = {
            "run": pa.DictionaryArray.from_arrays(runs, folders),
            "versions": pa.DictionaryArray.from_arrays(runs, pa.array(rows.versions, pa.string())),
            "value": pa.array(part["value"].to_numpy(), from_pandas=True),
            "detail": part["detail"].array.__arrow_array__().combine_chunks(),
            "seed": pa.array(part["seed"].astype(object).tolist(), pa.int64(), from_pandas=True),
        }
        for name in TEXTS:
            texts = part[name].array.remove_unused_categories()
            codes = pa.array(texts.codes.astype(np.int32), mask=texts.codes < 0)
            columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(texts.categories, pa.string()))
        yield pa.table({name: columns[name].cast(own.field(name).type) for name in own.names}, schema=own)


def _parts(rows: Rows, on_progress: OnProgress) -> Iterator[pd.DataFrame]:
    """The rows, `GROUP` at a time."""
    frame = rows.columns(on_progress).frame
    for start in range(0, len(frame), GROUP):
        yield frame.iloc[start : start + GROUP]
        on_progress(Progress(TASK, min(start + GROUP, len(frame)), len(frame), "rows"))


def _folders(rows: Rows) -> list[str]:
    return [str(folder) for folder in rows.folders] or [""] * len(rows.runs)


def _metadata(rows: Rows) -> dict[str, str]:
    runs = [{"run": name, **run} for name, run in zip(_folders(rows), rows.runs, strict=True)]
    return {
        METADATA: json.dumps({"format": FORMAT, "runs": runs}, ensure_ascii=False),
        UNREADABLE: json.dumps(rows.unreadable, ensure_ascii=False),
    }


def _write_parquet(rows: Rows, file: BinaryIO, on_progress: OnProgress) -> None:
    own = schema().with_metadata(_metadata(rows))
    with pq.ParquetWriter(file, own, compression="zstd") as writer:
        for table in _tables(rows, on_progress):
            writer.write_table(table.replace_schema_metadata(own.metadata), row_group_size=GROUP)


def _write_folder(rows: Rows, path: Path, partition: str, on_progress: OnProgress) -> Path:
    """FOLDER/method=NAME/part-0.parquet, and what was run in FOLDER/_runs.json."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists: choose another folder, or delete it first", option="to")
    if rows.columns(on_progress).frame[partition].isna().any():
        raise InputError(
            f"expected rows with a {partition}, got rows without one: runs of verify have methods, runs of "
            "stress have settings",
            option="partition",
        )
    make_parent(path, option="to")
    metadata = _metadata(rows)
    own = schema(plain=partition).with_metadata(metadata)
    batches = (b for table in _tables(rows, on_progress, plain=partition) for b in table.to_batches())
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
        about = {**json.loads(metadata[METADATA]), "unreadable": json.loads(metadata[UNREADABLE])}
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


# -- text ------------------------------------------------------------------------------------------


def _write_csv(rows: Rows, file: BinaryIO, on_progress: OnProgress) -> None:
    header = True
    for part in _parts(rows, on_progress):
        frame = rows.frame(part)
        frame["detail"] = ["" if detail is None else json.dumps(detail) for detail in frame["detail"]]
        texts = frame.columns[[name in TEXTS or name == "versions" for name in frame.columns]]
        frame[texts] = frame[texts].map(csv_text)
        file.write(frame.to_csv(index=False, header=header, lineterminator="\n").encode())
        header = False


def _write_lines(rows: Rows, file: BinaryIO, on_progress: OnProgress) -> None:
    with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed, io.TextIOWrapper(packed, "utf-8") as text:
        reasons = [{"image": image, "unreadable": why} for _, image, why in rows.columns().unreadable]
        for done, row in enumerate(chain(reasons, rows), 1):
            text.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")
            if done % GROUP == 0:
                on_progress(Progress(TASK, done, None, "rows"))


WRITERS: dict[str, Write] = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl.gz": _write_lines}
