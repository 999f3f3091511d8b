"""Files of a run folder, read with limits: regular files inside the folder, of bounded size, with JSON of
bounded depth. Anything else is a `BadInput`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from steadygaze.errors import BadInput, SteadygazeError

MIB = 2**20
MAX_FILE = 64 * MIB  # run.json, samples.json, a sample image
MAX_LINE = 16 * MIB  # one row
BLOCK = 8 * MIB  # rows that are read at a time
MAX_DEPTH = 32  # lists and tables inside one another
MAX_UNPACKED = 1024 * MIB  # rows of one .jsonl.gz
MAX_RATIO = 100  # of unpacked to packed size; rows reach about 30


def inside(folder: Path, name: str | Path) -> Path:
    """The regular file of this name in a run folder. Paths and links that lead out of it are refused."""
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
        within = resolved.is_relative_to(folder.resolve(strict=True))
    except FileNotFoundError as error:
        if path.is_symlink():
            raise BadInput(f"{path} is a link to a file that does not exist") from error
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a name with a zero byte, a loop of links
        raise BadInput(f"{path} cannot be read ({error})") from error
    if not within:
        raise BadInput(
            f"{path} leads out of its run folder: reports read files of the folder only. Copy the file into "
            "the folder if it belongs to the run."
        )
    if not resolved.is_file():
        raise BadInput(f"{path}: expected a file, got a folder or a special file")
    return path


def read_bounded(folder: Path, name: str | Path) -> bytes:
    """The content of a file of a run folder, of at most `MAX_FILE` bytes."""
    path = inside(folder, name)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from error
    if len(content) > MAX_FILE:
        raise BadInput(f"{path}: expected at most {MAX_FILE // MIB} MiB, got more")
    return content


def parse_json(text: bytes) -> Any:
    """A JSON value; ValueError for what is no JSON: NaN and infinity too, and values that are nested deeper
    than `MAX_DEPTH`.
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for one in layer
            if isinstance(one, (list, dict))
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (list, dict))
        ]
        if not layer:
            return value
    raise ValueError("it is nested too deeply")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def raw_blocks(path: Path) -> Iterator[bytes]:
    """The lines of a row file, plain or compressed, many at a time; a last line without its end is left
    out.
    """
    packed = path.suffix == ".gz"
    limit = MAX_UNPACKED
    if packed:
        limit = min(limit, max(MIB, MAX_RATIO * path.stat().st_size))
    total, rest = 0, b""
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            while data := file.read(BLOCK):
                total += len(data)
                data = rest + data
                end = data.rfind(b"\n") + 1
                block, rest = data[:end], data[end:]
                if _longest_line(block) > MAX_LINE or len(rest) > MAX_LINE:
                    raise BadInput(
                        f"{path}: expected rows of at most {MAX_LINE // MIB} MiB, got a longer one"
                    )
                if packed and block and total > limit:
                    raise BadInput(
                        f"{path}: unpacks to more than {limit // MIB} MiB, which no run writes. If it is "
                        "yours, unpack it with gunzip."
                    )
                if block:
                    yield block
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read ({error}): it is damaged or incomplete") from error


def _longest_line(block: bytes) -> int:
    return max(map(len, block.split(b"\n"))) if len(block) > MAX_LINE else 0


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a row file, one by one, without their ends."""
    for block in raw_blocks(path):
        yield from block.split(b"\n")[:-1]


@contextmanager
def damaged_files(*folders: str | Path) -> Iterator[None]:
    """Errors of computing with what these run folders hold become a `BadInput` that names them.

    Files are checked as they are read. What is left are values that do not fit together, such as a severity
    that is no number, which only the suite or metric they belong to can know.
    """
    try:
        yield
    except SteadygazeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        names = ", ".join(map(str, folders))
        raise BadInput(
            f"{names}: the values in run.json, the rows or the samples do not fit together "
            f"({type(error).__name__}: {str(error)[:200]}). The files are damaged, or of another "
            "version; run the measurement again."
        ) from error
