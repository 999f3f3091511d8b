"""Writing rows so that a run can be killed at any moment.

The rows of a job are one write at the end of the process's own file, followed by fsync. Rows that were
reported are on the disk; what a kill cut off is a last line without its end, which the next start drops. Rows
that are there are never computed again, unless the image they belong to was replaced since.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.files import FileLock, remove_leftovers, write_atomic, write_new
from steadygaze.runs.rows import (
    KEY_COLUMNS,
    Columns,
    Key,
    Row,
    RowKey,
    every_file,
    read_run,
    replaced_file,
    replacements,
    row_files,
    run_tables,
)
from steadygaze.runs.shards import WHOLE, Shard
from steadygaze.untrusted import refuse_links


def make_folder(folder: Path) -> None:
    """Make the folder of a run, if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RowsNotWrittenError(
            f"the folder {folder} cannot be created ({error.strerror}): choose another output folder"
        ) from error
    refuse_links(folder)
    remove_leftovers(folder)


def prepare(folder: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Begin the run in `folder`, or check that it can be resumed; one with other settings is refused.

    Changes no file of rows: another process may be writing them.
    """
    make_folder(folder)
    if holds_run(folder, settings):
        return
    if not _write_run(folder / "run.json", {"settings": settings, "about": about}):
        holds_run(folder, settings)  # another shard was first


def holds_run(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder holds a run with these settings; one with others is refused. Writes nothing."""
    path = folder / "run.json"
    if not path.exists() and row_files(folder) and not path.exists():  # another shard may begin meanwhile
        raise InputError(
            f"{folder} contains rows but no run.json, so their settings are unknown: choose another output "
            "folder"
        )
    if not path.exists():
        return False
    _check_same_settings(folder, read_run(folder)["settings"], settings)
    return True


def _write_run(path: Path, run: dict[str, Any]) -> bool:
    """Write run.json; False if another process was first."""
    try:
        return write_new(path, json.dumps(run, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RowsNotWrittenError(
            f"{path} could not be written ({error.strerror}): nothing was computed"
        ) from error


def _check_same_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        changes = (f"{key} was {_short(before.get(key))}, is now {_short(now.get(key))}" for key in changed)
        added = _how_to_add(folder, before, now) if set(changed) <= {"columns", "metrics"} else ""
        hint = " (other images, or the same ones in another order)" if "images_hash" in changed else ""
        raise InputError(
            f"{folder} contains a run with other settings: {'; '.join(changes)}{hint}. Use the same settings "
            f"to resume it, or choose another output folder.{added}"
        )


def _how_to_add(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> str:
    """How methods or metrics are added to a run: by a second one, which tables join to the first."""
    columns = [column for column in now["columns"] if column not in before["columns"]]
    added = [name for name in now["metrics"] if name not in before["metrics"]]
    added += dict.fromkeys(method for method, _ in columns)
    if not added:
        return ""
    return (
        f" To add {', '.join(added)} to it, run only that with another output folder: `steadygaze report "
        f"{folder} OTHER` shows both in one table."
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def row_line(row: Row) -> bytes:
    """A row as its line in a file."""
    return f"{json.dumps(row, separators=(',', ':'), ensure_ascii=False)}\n".encode()


class Store:
    """The file of one process, open for appending and locked. What a kill cut off at its end is removed.

    Attributes:
        label: Of the process, in the name of the file.
    """

    def __init__(self, folder: Path, label: str = "00000") -> None:
        self.folder, self.label = folder, label
        self.path = folder / f"rows-{label}.jsonl"
        self._lock = FileLock(self.path)
        try:
            repair(self._file, self.path)
        except BaseException:
            self.close()
            raise

    @property
    def _file(self) -> int:
        return self._lock.file

    def append(self, rows: Iterable[Row]) -> None:
        """Write the rows of a job; when this returns, they are on the disk. If it fails, the file is as it
        was.
        """
        data = b"".join(map(row_line, rows))
        status = os.fstat(self._file)
        before = status.st_size
        if not status.st_nlink:
            raise RowsNotWrittenError(
                f"{self.path} was removed while the run was writing it. Run the same command again to start "
                "over."
            )
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._sync()
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise RowsNotWrittenError(
                f"{self.path} could not be written: {error.strerror}. The rows before are intact; free some "
                "space and run the same command again to resume."
            ) from error

    def replace(self, contents: dict[str, str]) -> None:
        """Record that these images now have this content: rows of their earlier content no longer count."""
        path = replaced_file(self.folder, self.label)
        versions = {image: version for image, (version, _) in replacements(self.folder).items()}
        marks = [
            {"image": image, "content": content, "version": versions.get(image, 0) + 1}
            for image, content in contents.items()
        ]
        try:
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            write_atomic(path, before + "".join(f"{json.dumps(mark)}\n" for mark in marks))
        except OSError as error:
            raise RowsNotWrittenError(f"{path} could not be written: {error.strerror}") from error

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NO_SYNC = {22, 95}  # EINVAL, EOPNOTSUPP: pipes and special files
READ_SIZE = 65536  # bytes that are searched for the end of a line at a time


def repair(file: int, path: Path) -> None:
    """Cut off a last line that was not finished. `file` is open and locked: a line that its writer has not
    finished yet looks the same.
    """
    size = end = os.lseek(file, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - READ_SIZE)
        os.lseek(file, start, os.SEEK_SET)
        newline = os.read(file, end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        try:
            os.ftruncate(file, end)
        except OSError as error:
            raise RowsNotWrittenError(f"{path} cannot be written ({error.strerror})") from error


class Done:
    """What a folder already holds: which rows of each image, of which content, and which images were
    unreadable.

    flagged: (image, method or setting, score) of maps that are empty or broken
    shard: the part of the run that is computed here; files that cannot hold its rows are not read
    """

    def __init__(self, folder: Path | None, shard: Shard = WHOLE) -> None:
        self.unreadable: dict[str, str] = {}
        self.content: dict[str, str] = {}  # image -> hash of its content; "" where rows of one image disagree
        self.flagged: set[tuple[str, str, str]] = set()
        self._keys: dict[str, frozenset[RowKey]] = {}  # image -> its rows
        if folder is not None:
            self._read(folder, shard)

    def _read(self, folder: Path, shard: Shard) -> None:
        settings = read_run(folder)["settings"]
        # without a batch size, other batches may have been dealt out to the shards before
        wanted = shard.may_hold_own if "batch" in settings else every_file
        tables = ((0, table) for table in run_tables(folder, settings, wanted))
        rows = Columns.of_tables(tables, details=False)
        reasons = {image: reason for _, image, reason in rows.unreadable}
        self.unreadable = {image: reason for image, reason in reasons.items() if reason}
        self._keys = _keys_of_images(rows)
        self.flagged = _flagged(rows)
        hashed = np.flatnonzero(rows.codes["content"] >= 0)
        first = hashed[rows.groups(["image", "content"], hashed).first]
        for image, content in zip(rows.text("image", first), rows.text("content", first), strict=True):
            if self.content.setdefault(image, content) != content:
                self.content[image] = ""

    def has(self, key: Key) -> bool:
        """Whether this row is there."""
        image, *rest = key
        return tuple(rest) in self._keys.get(image, ())

    def lacks(self, image: str, keys: Iterable[RowKey]) -> bool:
        """Whether any of these rows of an image is missing."""
        return not self._keys.get(image, frozenset()).issuperset(keys)

    def any_lacks(self, images: Iterable[str], keys: tuple[RowKey, ...]) -> bool:
        """Whether any of these images lacks any of these rows."""
        return any(self.lacks(image, keys) for image in images)

    def count(self, image: str, keys: Iterable[RowKey]) -> int:
        """How many of these rows of an image are there."""
        return len(self._keys.get(image, frozenset()).intersection(keys))

    def forget(self, image: str) -> None:
        """The rows of an image no longer count."""
        self._keys.pop(image, None)
        self.flagged = {entry for entry in self.flagged if entry[0] != image}


def _keys_of_images(rows: Columns) -> dict[str, frozenset[RowKey]]:
    """Image -> the keys of its rows. Most images have the same keys: equal sets are stored once."""
    if not len(rows):
        return {}
    groups = rows.groups(KEY_COLUMNS)
    texts = zip(*(rows.text(name, groups.first) for name in KEY_COLUMNS), strict=True)
    keys = [(method or setting, score or "", metric) for method, setting, score, metric in texts]
    images = rows.codes["image"]
    order = np.lexsort((groups.of_row, images))
    starts = np.flatnonzero(np.diff(images[order], prepend=-1))
    shared: dict[bytes, frozenset[RowKey]] = {}
    keys_of_images = {}
    for image, numbers in zip(
        rows.text("image", order[starts]), np.split(groups.of_row[order], starts[1:]), strict=True
    ):
        if numbers.tobytes() not in shared:
            shared[numbers.tobytes()] = frozenset(keys[number] for number in numbers)
        keys_of_images[image] = shared[numbers.tobytes()]
    return keys_of_images


def _flagged(rows: Columns) -> set[tuple[str, str, str]]:
    """(image, method or setting, score) of the maps that are empty or broken."""
    flagged = np.flatnonzero(rows.filled("flag"))
    columns = ("image", "method", "setting", "score")
    first = flagged[rows.groups(columns, flagged).first]
    texts = zip(*(rows.text(name, first) for name in columns), strict=True)
    return {(image, method or setting, score or "") for image, method, setting, score in texts}
