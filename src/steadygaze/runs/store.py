"""Writing rows so that a run can be killed at any moment.

A batch of rows is one write at the end of the worker's own file, then fsync. What was reported is on the disk; what a
kill cut off is a last line without its end, which the next start drops. A batch whose rows are all there is never
computed again.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput, RowsNotWritten
from steadygaze.runs.rows import Row, lines, read_run, row_files

try:
    import fcntl
except ImportError:  # Windows: no lock, the rest is the same
    fcntl = None  # type: ignore[assignment]

Key = tuple[str, str, str, str]  # image, method and score (of a stress run: setting and nothing), metric


def prepare(folder: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Begin the run in `folder`, or make it ready to go on; one with other settings is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RowsNotWritten(
            f"the folder {folder} cannot be made ({error.strerror}): choose another --out"
        ) from error
    path = folder / "run.json"
    if path.exists():
        _compare(folder, read_run(folder)["settings"], settings)
    elif row_files(folder):
        raise BadInput(
            f"{folder} holds rows but no run.json, so nobody knows what they are: choose another --out"
        )
    else:
        _write_whole(
            path, json.dumps({"settings": settings, "about": about}, indent=2, ensure_ascii=False) + "\n"
        )
    for file in row_files(folder):
        repair(file)


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is either there in full or not at all."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RowsNotWritten(
            f"{path} could not be written ({error.strerror}): nothing was computed"
        ) from error


def _compare(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        shown = "; ".join(
            f"{key} was {_short(before.get(key))}, is now {_short(now.get(key))}" for key in changed
        )
        shown += " (other pictures, or others first)" if "pictures_hash" in changed else ""
        raise BadInput(
            f"{folder} holds a run with other settings: {shown}. Give the same ones to go on with it, or another --out."
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def repair(path: Path) -> None:
    """Cut off a last line that was not finished."""
    if path.suffix == ".gz":
        return
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
    if end < size:
        try:
            os.truncate(path, end)
        except OSError as error:
            raise RowsNotWritten(f"{path} cannot be written ({error.strerror})") from error


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A fork that outlives its killed parent would hold the lock, and the run could not be gone on with."""
    for store in list(_OPEN):
        store.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


class Store:
    """The file of one worker, open for appending."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder / f"rows-{rank:05d}.jsonl"
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RowsNotWritten(f"{self.path} cannot be written ({error.strerror})") from error
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._file)
                raise BadInput(
                    f"{folder}: another process is writing this run. Wait for it, or choose another --out."
                ) from error
            except OSError:  # a file system without locks
                pass
        _OPEN.add(self)

    def append(self, rows: Iterable[Row]) -> None:
        """Write the rows of a batch; when this returns, they are on the disk. If it fails, the file is as it was."""
        data = "".join(
            json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows
        ).encode()
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
                f"{self.path} could not be written: {error.strerror}. The rows before are intact; make room and give "
                "the same command again, it goes on from there."
            ) from error

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NO_SYNC = {22, 95}  # EINVAL, EOPNOTSUPP: pipes and special files


class Done:
    """What a folder already holds: how many rows of each picture, and which could not be read."""

    def __init__(self, folder: Path | None) -> None:
        self.files = [] if folder is None else row_files(folder)
        self.counts: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        for path in self.files:
            for row in lines(path):
                if "unreadable" in row:
                    self.unreadable[row["image"]] = row["unreadable"]
                else:
                    self.counts[row["image"]] = self.counts.get(row["image"], 0) + 1
        self.unreadable = {image: why for image, why in self.unreadable.items() if why}

    def missing(self, images: Sequence[str], expected: int) -> list[str]:
        """Those of `images` that lack rows."""
        return [image for image in images if self.counts.get(image, 0) < expected]

    def keys(self, images: Iterable[str]) -> set[Key]:
        """The rows that are there of these pictures; reads the files again, which only a cut-off batch needs."""
        wanted = {image for image in images if image in self.counts}
        if not wanted:
            return set()
        return {
            key_of(row)
            for path in self.files
            for row in lines(path)
            if row["image"] in wanted and "metric" in row
        }


def key_of(row: Row) -> Key:
    """What tells a row from every other row of the run."""
    return row["image"], row.get("method") or row["setting"], row.get("score", ""), row["metric"]
