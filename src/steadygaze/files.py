"""Writing files so that a reader finds the old content or the new one, never half of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> Path:
    """Write `content` beside `path`, flush it to the disk, then rename it into place.

    content: bytes, text (written as UTF-8), or a function that writes into the open binary file it is given
    Raises OSError, and leaves what was at `path`, if the disk is full or read-only.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
