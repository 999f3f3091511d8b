"""Rows of a table as images: datasets of the Hugging Face hub, and folders of Parquet, Arrow or image files.

The library `datasets` opens all of them and streams their rows; nothing is downloaded as a whole. It executes
no code of a dataset (version 4 and later). Images are bytes, decoded by `read_image`.

The key of a row is its split and number, or the column that `key=` names.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygaze.data.datasets.tree import abbreviated
from steadygaze.data.decoding import first_line
from steadygaze.data.folders import check_group_columns, group_name
from steadygaze.data.images import EncodedImage
from steadygaze.data.stream_spec import MAX_BYTES, ImageBytes, Sample, StreamSpec
from steadygaze.errors import ImageError, InputError, UnknownNameError
from steadygaze.untrusted import MAX_RATIO, MIB

LABELS = ("label", "labels", "cls", "class")  # usual names of the column of labels
IMAGES = ("image", "img", "jpg", "png", "jpeg", "webp", "image_bytes")
LEAST_UNPACKED = 64 * MIB  # bytes that a column of any row group may unpack to
MAX_COLUMN = 4096 * MIB  # the same at most
MAX_HEADER = 16 * MIB  # bytes of the header of a batch in an Arrow file
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # kinds of messages in one
ROWS = 8  # of a Parquet file that are in memory at a time
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*\.parquet)")  # how files of a split are numbered


@dataclass
class TableRows:
    """The rows of one split.

    Attributes:
        columns: The column of each of image, label, mask and key.
        groups: Columns whose values name the group of an image; names of their integers, if declared.
        label_names: Names of integer labels that the data itself declares.
        files: Of the hub, which are checked before they are read.
        damaged: What could not be read whole; filled while samples are read.
    """

    spec: StreamSpec
    dataset: Any
    split: str
    folder: Path | None
    columns: Mapping[str, str]
    rows: int | None = None
    label_names: tuple[str, ...] | None = None
    files: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, spec: StreamSpec, groups: Sequence[str] = ()) -> TableRows:
        """The split that the options name, or the only one; every column that is needed is checked."""
        folder = _local_folder(spec)
        if folder is not None:
            _check_numbered_files(spec, folder)
        loaded, files = _load(spec, folder)
        dataset, split = _split(spec, loaded)
        rows = _number_of_rows(dataset, split, folder if list(loaded) == [split] else None)
        if hasattr(dataset, "to_iterable_dataset"):
            dataset = dataset.to_iterable_dataset()
        features = dataset.features or _features_of_first_row(spec, dataset)
        columns = _columns(spec, features)
        label: Any = features.get(columns.get("label", ""))
        names = _names(label)
        check_group_columns(groups, features)
        dataset = dataset.select_columns(sorted({*columns.values(), *groups}))
        for role in ("image", "mask"):
            if role in columns:
                dataset = _undecoded(spec, dataset, columns[role], features[columns[role]])
        named = {column: _names(features[column]) for column in groups}
        return cls(spec, dataset, split, folder, columns, rows, names, files.get(split, ()), named)

    layout = "Hugging Face dataset"  # for display

    @property
    def name(self) -> str:
        """The name of the data, for display."""
        return self.spec.location if self.folder is None else self.folder.resolve().name

    @property
    def local(self) -> bool:
        """Whether reading the data again costs little."""
        return self.folder is not None

    def facts(self) -> dict[str, Any]:
        """What identifies the data, for the settings of a run."""
        return {"split": self.split, "columns": dict(self.columns)}

    def count(self, limit: int | None) -> int | None:
        """The number of rows, at most `limit`; None if it is not known without reading everything."""
        return self.rows if self.rows is None or limit is None else min(self.rows, limit)

    def samples(self) -> Iterator[Sample]:
        """Every sample, from the start."""
        row = -1
        try:
            for row, values in enumerate(self._rows()):
                yield self._sample(row, values)
        except Exception as error:  # Arrow, the network and the file system raise many kinds
            where = f"{self._holder}: reading stopped before row {row + 1}"
            self.damaged[self._holder] = (
                f"{where} ({first_line(error)}). The rows after it are left out: repair the data and repeat "
                "the command to add them."
            )

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """All rows; a file of the hub is checked when its first row is needed."""
        if self.files and getattr(self.dataset, "num_shards", 0) == len(self.files):
            for number, file in enumerate(self.files):
                check_table_file(file)
                yield from self.dataset.shard(len(self.files), number)
            return
        for file in self.files:
            check_table_file(file)
        yield from self.dataset

    @property
    def _holder(self) -> str:
        return f"hf:{self.spec.location}, split {self.split}"

    def _sample(self, row: int, values: Mapping[str, Any]) -> Sample:
        own_key = values.get(self.columns.get("key", ""))
        key = f"{self.split}/{row:08d}" if own_key is None else str(own_key)
        label = values.get(self.columns.get("label", ""))
        try:
            image = self._encoded("image", key, values)
            mask = self._encoded("mask", key, values) if "mask" in self.columns else None
        except ImageError as error:
            return Sample(key, self._holder, problem=str(error))
        group = group_name(list(self.groups), [self._value(name, values[name]) for name in self.groups])
        return Sample(key, self._holder, image, None if label is None else str(label), mask, group=group)

    def _value(self, column: str, value: Any) -> Any:
        names = self.groups[column]
        return value if names is None or not isinstance(value, int) else names[value]

    def _encoded(self, role: str, key: str, values: Mapping[str, Any]) -> EncodedImage:
        column = self.columns[role]
        name, value = f"{self._holder}: {key}, column {column}", values[column]
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if data is None and isinstance(path, str):
            data = self._file(path)
        if not isinstance(data, bytes):
            raise ImageError(f"column {column}: expected the bytes of an image, got {type(data).__name__}")
        if len(data) > MAX_BYTES:
            raise ImageError(f"column {column}: expected at most {MAX_BYTES} bytes, got {len(data)}")
        return ImageBytes(name, data)

    def _file(self, path: str) -> bytes | None:
        """An image file of the dataset; files outside of it are not read."""
        if self.folder is not None:
            file = Path(path)
            inside = file.resolve().is_relative_to(self.folder.resolve())
            return file.read_bytes() if inside and file.is_file() else None
        if not path.startswith(f"hf://datasets/{self.spec.location}"):
            return None
        import fsspec

        with fsspec.open(path, "rb") as opened:
            return opened.read(MAX_BYTES + 1)


# -- opening ---------------------------------------------------------------------------------------


def _local_folder(spec: StreamSpec) -> Path | None:
    folder = Path(spec.location).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"data: expected owner/name or a folder after hf:, got the file {folder}")
    if spec.location.startswith((".", "/", "~")) or len(folder.parts) > 2:
        raise InputError(f"data: expected owner/name or a folder after hf:, got {folder}: no such folder")
    return None


def _check_numbered_files(spec: StreamSpec, folder: Path) -> None:
    """NAME-00000-of-00004.parquet and so on: an error that lists what is missing."""
    parts: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in folder.rglob("*.parquet"):
        if match := NUMBERED.fullmatch(file.name):
            stem, number, total, rest = match.groups()
            parts.setdefault((file.parent, stem, total, rest), set()).add(int(number))
    missing = [
        str(parent / f"{stem}-{number:05d}-of-{total}{rest}")
        for (parent, stem, total, rest), numbers in sorted(parts.items())
        for number in range(int(total))
        if number not in numbers
    ]
    if missing:
        raise InputError(
            f"data: {len(missing)} files of {spec} do not exist: {abbreviated(missing)}. "
            "Complete the download."
        )


def check_table_file(file: str | Path) -> None:
    """`InputError` for a Parquet or Arrow file that unpacks to much more than its size.

    Args:
        file: A path, or the address of a file of the hub.
    """
    import fsspec

    suffix = Path(str(file)).suffix
    if suffix not in (".parquet", ".arrow"):
        return
    with fsspec.open(str(file), "rb") as opened:
        if suffix == ".parquet":
            _check_parquet(str(file), opened)
        elif _is_compressed_arrow(opened):
            raise InputError(
                f"data: {file} is a compressed Arrow file, whose unpacked size is not known before it is "
                "read. If it is yours, write it without compression, as datasets does, or as Parquet."
            )


def _check_parquet(name: str, file: Any) -> None:
    from pyarrow.parquet import read_metadata

    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        metadata = read_metadata(file)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    except Exception:  # a damaged file is named when its rows are read
        return
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    if largest > min(max(LEAST_UNPACKED, MAX_RATIO * size), MAX_COLUMN):
        raise InputError(
            f"data: {name} has {size:,} bytes and unpacks to {largest:,} for one column of one row group. If "
            "it is yours, write it with smaller row groups."
        )


def _is_compressed_arrow(file: Any) -> bool:
    """Whether a batch of an Arrow file or stream is compressed; only the headers of batches are read.

    A header is a flatbuffer, https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
    """
    if file.read(8)[:6] != b"ARROW1":  # a stream, without the first bytes of a file
        file.seek(0)
    while True:
        start = file.read(8)
        if start[:4] != b"\xff\xff\xff\xff" or len(start) < 8:
            return False  # the end, or damaged: named when its rows are read
        size = int.from_bytes(start[4:], "little")
        if size > MAX_HEADER:
            raise InputError(
                f"data: expected headers of at most {MAX_HEADER // MIB} MiB in Arrow files, got more"
            )
        header = file.read(size)
        try:
            message = _table(header, 0)
            batch = _field(header, message, 2)
            kind = header[_field(header, message, 1) or 0]
            if kind == DICTIONARY_BATCH and batch is not None:
                batch = _field(header, _table(header, batch), 1)
            is_batch = kind in (RECORD_BATCH, DICTIONARY_BATCH) and batch is not None
            if is_batch and _field(header, _table(header, batch), 3) is not None:  # type: ignore[arg-type]
                return True
            length = _field(header, message, 3)
            body = 0 if length is None else int.from_bytes(header[length : length + 8], "little")
            file.seek(body, os.SEEK_CUR)
        except (IndexError, OSError, OverflowError, ValueError, struct.error):
            return False


def _table(data: bytes, at: int) -> int:
    """The place of the table that the offset at this place leads to."""
    (offset,) = struct.unpack_from("<I", data, at)
    return at + int(offset)


def _field(data: bytes, table: int, number: int) -> int | None:
    """The place of a field of a table; None if it is not there."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + offset if offset else None


def _load(spec: StreamSpec, folder: Path | None) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """The dataset, streamed: one split, or a dict of all; and the files of each split that are to be checked.

    A value of a Parquet file may repeat an entry of a dictionary in each row, so few rows are read at a time.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError("hf: data needs datasets: pip install 'steadygaze[data]'") from error
    options = spec.options
    try:
        if folder is not None:
            for suffix in ("parquet", "arrow"):
                for file in folder.rglob(f"*.{suffix}"):
                    if file.is_file():
                        check_table_file(file)
            if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
                return datasets.load_from_disk(str(folder)), {}
        builder = datasets.load_dataset_builder(
            spec.location if folder is None else str(folder),
            name=options.get("config"),
            revision=options.get("revision") if folder is None else None,
        )
        if builder.name == "parquet":
            builder.config.batch_size = ROWS
        files: dict[str, tuple[str, ...]] = {}
        if folder is None:
            by_split = builder.config.data_files or {}
            files = {str(split): tuple(map(str, names)) for split, names in by_split.items()}
        return builder.as_streaming_dataset(), files
    except InputError:
        raise
    except Exception as error:  # the network, the hub and every file format raise kinds of their own
        raise InputError(f"data: {spec} cannot be opened ({first_line(error)})") from error


def _split(spec: StreamSpec, dataset: Any) -> tuple[Any, str]:
    wanted = spec.options.get("split")
    if hasattr(dataset, "features"):  # one split, saved by save_to_disk
        split = str(dataset.split or "data")
        if wanted not in (None, split):
            raise UnknownNameError("split", str(wanted), [split])
        return dataset, split
    splits = list(dataset)
    if wanted is None and len(splits) > 1:
        raise InputError(
            f"data: {spec} has the splits {', '.join(splits)}: choose one, as in ?split={splits[-1]}"
        )
    split = wanted or splits[0]
    if split not in splits:
        raise UnknownNameError("split", split, splits)
    return dataset[split], split


def _number_of_rows(dataset: Any, split: str, folder: Path | None) -> int | None:
    """The number of rows of a split, if it is known without reading them. folder: holds this split alone."""
    if hasattr(dataset, "__len__"):
        return len(dataset)
    declared = (dataset.info.splits or {}).get(split)
    if declared is not None and declared.num_examples:
        return int(declared.num_examples)
    files = [] if folder is None else list(folder.rglob("*.parquet"))
    try:
        from pyarrow.parquet import read_metadata

        return sum(read_metadata(file).num_rows for file in files) or None
    except Exception:  # a damaged file is named when its rows are read
        return None


def _features_of_first_row(spec: StreamSpec, dataset: Any) -> Mapping[str, Any]:
    """Columns of a format that declares no types."""
    try:
        return dict.fromkeys(next(iter(dataset)))
    except StopIteration as error:
        raise InputError(f"data: {spec} has no rows") from error
    except Exception as error:
        raise InputError(f"data: {spec} cannot be read ({first_line(error)})") from error


def _columns(spec: StreamSpec, features: Mapping[str, Any]) -> dict[str, str]:
    """The column for each of image, label, mask and key."""
    columns = {}
    for role in ("image", "label", "mask", "key"):
        if role in spec.options:
            columns[role] = spec.options[role]
            if columns[role] not in features:
                raise UnknownNameError("column", columns[role], features)
    if "image" not in columns:
        typed = [name for name, feature in features.items() if _kind(feature) == "Image"]
        found = next(iter([*typed, *(name for name in IMAGES if name in features)]), None)
        if found is None:
            raise InputError(
                f"data: {spec} has the columns {', '.join(features)}, and none that is declared as images. "
                "Name it, as in ?image=COLUMN"
            )
        columns["image"] = found
    if "label" not in columns:
        typed = [name for name, feature in features.items() if _kind(feature) == "ClassLabel"]
        usual = [name for name in LABELS if name in features]
        found = next(iter(usual or (typed if len(typed) == 1 else [])), None)
        if found is not None:
            columns["label"] = found
    return columns


def _undecoded(spec: StreamSpec, dataset: Any, column: str, feature: Any) -> Any:
    """The dataset with this column as encoded images; an error if it holds something else."""
    from datasets import Image

    if _kind(feature) == "Image":
        return dataset.cast_column(column, Image(decode=False))
    keys = set(feature) if isinstance(feature, dict) else set()
    if feature is None or "bytes" in keys or getattr(feature, "dtype", "") in ("binary", "large_binary"):
        return dataset
    raise InputError(
        f"data: expected images in the column {column} of {spec}, got "
        f"{getattr(feature, 'dtype', None) or _kind(feature)}. Name another, as in ?image=COLUMN"
    )


def _names(feature: Any) -> tuple[str, ...] | None:
    return tuple(feature.names) if _kind(feature) == "ClassLabel" else None


def _kind(feature: Any) -> str:
    return type(feature).__name__
