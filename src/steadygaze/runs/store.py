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

from steadygaze.errors import BadInput, RowsNotWritten
from steadygaze.files import FileLock, write_atomic
from steadygaze.runs.rows import (
    Key as Key,
)
from steadygaze.runs.rows import (
    Row,
    RowKey,
    read_run,
    replaced_file,
    replacements,
    row_files,
    row_key,
    valid_lines,
)
from steadygaze.runs.rows import (
    key_of as key_of,
)


def make_folder(folder: Path) -> None:
    """Make the folder of a run, if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RowsNotWritten(
            f"the folder {folder} cannot be made ({error.strerror}): choose another output folder"
        ) from error


def prepare(folder: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Begin the run in `folder`, or check that it can be resumed; one with other settings is refused.

    Changes no file of rows: another process may be writing them.
    """
    make_folder(folder)
    path = folder / "run.json"
    if path.exists():
        _check_same_settings(folder, read_run(folder)["settings"], settings)
    elif row_files(folder):
        raise BadInput(
            f"{folder} holds rows but no run.json, so their settings are unknown: choose another output "
            "folder"
        )
    else:
        _write_run(path, {"settings": settings, "about": about})


def _write_run(path: Path, run: dict[str, Any]) -> None:
    try:
        write_atomic(path, json.dumps(run, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RowsNotWritten(
            f"{path} could not be written ({error.strerror}): nothing was computed"
        ) from error


def _check_same_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        changes = (f"{key} was {_short(before.get(key))}, is now {_short(now.get(key))}" for key in changed)
        hint = " (other images, or the same ones in another order)" if "pictures_hash" in changed else ""
        raise BadInput(
            f"{folder} holds a run with other settings: {'; '.join(changes)}{hint}. Use the same settings to "
            "resume "
            "it, or choose another output folder."
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


class Store:
    """The file of one process, open for appending and locked. What a kill cut off at its end is removed."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self.path = folder / f"rows-{rank:05d}.jsonl"
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
        texts = (json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows)
        data = "".join(f"{text}\n" for text in texts).encode()
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._sync()
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise RowsNotWritten(
                f"{self.path} could not be written: {error.strerror}. The rows before are intact; free some "
                "space and "
                "run the same command again to resume."
            ) from error

    def replace(self, contents: dict[str, str]) -> None:
        """Record that these images now have this content: rows of their earlier content no longer count."""
        path = replaced_file(self.folder, self.rank)
        versions = {image: version for image, (version, _) in replacements(self.folder).items()}
        marks = [
            {"image": image, "content": content, "version": versions.get(image, 0) + 1}
            for image, content in contents.items()
        ]
        try:
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            write_atomic(path, before + "".join(f"{json.dumps(mark)}\n" for mark in marks))
        except OSError as error:
            raise RowsNotWritten(f"{path} could not be written: {error.strerror}") from error

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
            raise RowsNotWritten(f"{path} cannot be written ({error.strerror})") from error


class Done:
    """What a folder already holds: which rows of each image, of which content, and which images were
    unreadable.

    Rows are kept as one bit for each image and row key, so that a run of millions of rows fits into memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.unreadable: dict[str, str] = {}
        self.content: dict[
            str, str
        ] = {}  # image -> content hash of its rows; "" where rows of one image disagree
        self._bits: dict[RowKey, int] = {}
        self._rows: dict[str, int] = {}  # image -> bits of its rows
        self._masks: dict[tuple[RowKey, ...], int] = {}
        settings = {} if folder is None else read_run(folder)["settings"]
        for row in () if folder is None else valid_lines(folder, settings):
            image = row["image"]
            if "unreadable" in row:
                self.unreadable[image] = row["unreadable"]
                continue
            self._rows[image] = self._rows.get(image, 0) | self._bit(row_key(row))
            if "content" in row and self.content.setdefault(image, row["content"]) != row["content"]:
                self.content[image] = ""
        self.unreadable = {image: reason for image, reason in self.unreadable.items() if reason}

    def _bit(self, key: RowKey) -> int:
        return 1 << self._bits.setdefault(key, len(self._bits))

    def has(self, key: Key) -> bool:
        """Whether this row is there."""
        image, *rest = key
        return bool(self._rows.get(image, 0) & self._bit((rest[0], rest[1], rest[2])))

    def lacks(self, image: str, keys: Iterable[RowKey]) -> bool:
        """Whether any of these rows of an image is missing."""
        mask = self._mask(tuple(keys))
        return self._rows.get(image, 0) & mask != mask

    def _mask(self, keys: tuple[RowKey, ...]) -> int:
        if keys not in self._masks:
            self._masks[keys] = sum({self._bit(key) for key in keys})
        return self._masks[keys]

    def forget(self, image: str) -> None:
        """The rows of an image no longer count."""
        self._rows.pop(image, None)
