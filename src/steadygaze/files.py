"""Writing files so that a reader never finds half a file, and so that a folder has one writer at a time."""

from __future__ import annotations

import errno
import io
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from steadygaze.errors import InputError, RowsNotWrittenError

if TYPE_CHECKING:
    from PIL.Image import Image

try:
    import fcntl
except ImportError:  # Windows has no such lock; everything else is the same
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"  # the file whose lock stands for its whole folder
LOCK_TRIES, LOCK_WAIT = 3, 0.05  # seconds between two tries
PART = ".part"  # end of the name of a file that is being written
LEFTOVER_SECONDS = 5.0  # between the creation of such a file and its lock
UNLOCKABLE_SECONDS = 24 * 3600.0  # the same where locks are unknown
CLAIM_SECONDS = 10.0  # that the owner of a claim has to write its file
FIGURE_FORMATS = {  # of files that hold one figure: suffix -> PIL's name
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".pdf": "PDF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".bmp": "BMP",
    ".gif": "GIF",
}
_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def make_parent(path: Path, option: str | None = None) -> None:
    """Create the folder of a file; outside the current folder only if one folder of its path is missing.

    A mistyped absolute path would otherwise leave new folders anywhere on the disk.

    Raises:
        InputError: If more folders are missing, or one directly below the root; option: the one to change.
    """
    folder = path.absolute().parent
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    at_root = missing and missing[-1].parent == Path(folder.anchor)
    if (len(missing) > 1 or at_root) and not folder.is_relative_to(Path.cwd()):
        raise InputError(
            f"{path}: no such folder: {missing[-1]}. Create {folder} first, or choose another output file",
            option=option,
        )
    folder.mkdir(parents=True, exist_ok=True)


def write_atomic(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> Path:
    """Write `content` beside `path`, flush it to the disk, then rename it into place.

    Args:
        content: Bytes, text (written as UTF-8), or a function that writes into the open binary file it is
            given.

    Raises:
        OSError: If the disk is full or read-only; its `filename` is `path`, which is left as it was.
    """
    path = Path(path)
    with _errors_of(path):
        new = _write_beside(path, content)
        try:
            return new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Name the file that was to be written in errors, not the temporary one beside it."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_png(path: str | Path, image: Image) -> Path:
    """Write an image as PNG, with `write_atomic`."""
    return write_atomic(path, lambda file: image.save(file, "PNG"))


def write_figure(path: str | Path, image: Image) -> Path:
    """Write an image in the format of the suffix, one of `FIGURE_FORMATS`, with `write_atomic`."""
    path = Path(path)
    make_parent(path)
    return write_atomic(path, lambda file: image.save(file, FIGURE_FORMATS[path.suffix.lower()]))


def write_npz(path: str | Path, arrays: Mapping[str, Any]) -> Path:
    """Write arrays by name as a compressed .npz file, with `write_atomic`."""
    import numpy as np

    buffer = io.BytesIO()  # numpy's writer does not end cleanly on a full disk
    np.savez_compressed(buffer, **arrays)
    return write_atomic(path, buffer.getvalue())


def write_new(path: str | Path, content: bytes | str) -> bool:
    """Write a file that must not be there yet; False, with nothing changed, if it is.

    Of several processes that try, also on several machines with a network file system, one succeeds, and no
    reader finds half a file. Raises OSError as `write_atomic` does.
    """
    path = Path(path)
    with _errors_of(path):
        new = _write_beside(path, content)
        try:
            os.link(new, path)
        except FileExistsError:
            return new.stat().st_nlink == 2  # a network file system may repeat a request that succeeded
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return _claim_and_rename(new, path)
        finally:
            new.unlink(missing_ok=True)
        return True


def _claim_and_rename(new: Path, path: Path) -> bool:
    """Rename without hard links: the process that creates the claim renames, the others wait for the file."""
    claim = path.with_name(f".{path.name}.claim")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        until = time.monotonic() + CLAIM_SECONDS
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        if path.exists():
            return False
    try:  # the claim is ours, or its owner died
        if path.exists():
            return False
        new.replace(path)
        return True
    finally:
        claim.unlink(missing_ok=True)


def _write_beside(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> Path:
    """Write the content to a new file in the folder of `path` and flush it to the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=PART)
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if fcntl is not None:  # what is not locked was left by a process that was killed
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.chmod(0o644)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return new


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder; those of living ones are locked."""
    for part in folder.glob(f".*{PART}"):
        with suppress(OSError):
            age = time.time() - part.lstat().st_mtime
            if age > (LEFTOVER_SECONDS if is_locked(part) is False else UNLOCKABLE_SECONDS):
                part.unlink()


_OPEN: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close locks: a forked worker that outlives its killed parent would hold them, and bar a resumed run."""
    for lock in list(_OPEN):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class FileLock:
    """A file that is open for appending and locked: another process that locks it gets an `InputError`.

    The lock ends with `close`, with the `with` block, or with the process, however it ends. It also holds
    against other threads of this process. File systems without locks are written to without one.

    Args:
        path: The file, which is created if there is none; `lock_folder` locks a whole folder.
        shared: Whether several processes may hold the lock, but none that wants it alone.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.file = -1
        try:
            follow = getattr(os, "O_NOFOLLOW", 0)  # a link may lead out of the folder
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | follow, 0o644)
        except OSError as error:
            raise RowsNotWrittenError(f"{path} cannot be written ({error.strerror})") from error
        if fcntl is not None:
            try:
                _lock(self.file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            except BlockingIOError as error:
                self.close()
                raise InputError(
                    f"{path.parent}: another process is writing this run. Wait for it, or choose another "
                    "output folder."
                ) from error
            except OSError:  # a file system without locks
                pass
        _OPEN.add(self)

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(file: int, kind: int) -> None:
    """Take a lock; a reader that tests it (`is_locked`) holds it for a moment only."""
    for tries_left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(LOCK_WAIT)


def is_locked(path: Path) -> bool | None:
    """Whether another process holds the exclusive lock of a file; None if the file system has no locks."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(file)
    return None


def lock_folder(folder: str | Path) -> FileLock:
    """Lock the folder of a run, which must exist, for this process alone.

    with lock_folder(out):
        ...  # write files into out
    """
    return FileLock(Path(folder) / LOCK)
