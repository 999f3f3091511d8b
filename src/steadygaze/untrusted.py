"""Bounds on files from strangers: size, depth, place, and the schema of run folders.

A file may be wrong, must not lead out of its folder, and must not take unbounded memory before it is refused.
Files are regular files inside their folder, of bounded size, with JSON of bounded depth, checked against the
models below; keys that are not named there are kept as they are. Anything else is an `InputError`.
"""

from __future__ import annotations

import gzip
import json
import os
import pickletools
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steadygaze.errors import CheckpointError, InputError, SteadygazeError

MIB = 2**20
MAX_FILE = 64 * MIB  # run.json, samples.json, a sample image
MAX_LINE = 16 * MIB  # one row
BLOCK = 8 * MIB  # rows that are read at a time
MAX_DEPTH = 32  # lists and tables inside one another
MAX_UNPACKED = 1024 * MIB  # rows of one .jsonl.gz
MAX_RATIO = 100  # of unpacked to packed size; rows reach about 30


def inside(folder: Path, name: str | Path, *also: Path) -> Path:
    """Return the path of a regular file in a folder; paths and links that lead out of it are refused.

    Args:
        also: Other folders that a link may lead to.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: The path leads out of the folder, or is not a regular file.
    """
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
        places = (folder.resolve(strict=True), *(other.resolve() for other in also))
        within = any(resolved.is_relative_to(place) for place in places)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise InputError(f"{path} is a link to a file that does not exist") from error
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a name with a zero byte, a loop of links
        raise InputError(f"{path} cannot be read ({error})") from error
    if not within:
        raise InputError(
            f"{path} leads out of its folder: only files of the folder are used. Copy the "
            "file into the folder "
            "if it belongs there."
        )
    if not resolved.is_file():
        raise InputError(f"{path}: expected a file, got a folder or a special file")
    return path


def refuse_links(folder: Path) -> None:
    """`InputError` if anything below a folder is a link out of it; call it before writing into the folder."""
    waiting = [folder]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # what cannot be listed is reported by whoever writes to it
            continue
        waiting += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for entry in entries:
            if not entry.is_symlink():
                continue
            target = os.path.realpath(entry.path)
            if not Path(target).is_relative_to(folder.resolve()):
                raise InputError(
                    f"{entry.path} is a link to {target}, out of its folder: a run writes into its "
                    "folder only. "
                    "Replace the link by what it names, or choose another output folder."
                )


def read_bounded(folder: Path, name: str | Path, *also: Path) -> bytes:
    """Read a file of a folder, of at most `MAX_FILE` bytes; arguments and errors as for `inside`."""
    path = inside(folder, name, *also)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    if len(content) > MAX_FILE:
        raise InputError(f"{path}: expected at most {MAX_FILE // MIB} MiB, got more")
    return content


def read_json(folder: Path, name: str | Path, advice: str = "", also: Sequence[Path] = ()) -> Any:
    """Read a JSON file of a folder; what is wrong with it is an `InputError` that ends with the advice."""
    try:
        return parse_json(read_bounded(folder, name, *also))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder / name} cannot be read ({error}){advice}") from error


def parse_json(text: bytes) -> Any:
    """Parse JSON; raises ValueError for NaN, infinity, and values nested deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    layer = [value] if isinstance(value, (list, dict)) else []
    for _ in range(MAX_DEPTH):
        tables = [item.values() if isinstance(item, dict) else item for item in layer]
        layer = [inner for table in tables for inner in table if isinstance(inner, (list, dict))]
        if not layer:
            return value
    raise ValueError("it is nested too deeply")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read_text(path: str | Path, option: str | None = None) -> str:
    """Read a text file that a user or a recipe names: a regular file of at most `MAX_FILE` bytes, in UTF-8.

    Raises:
        InputError: The file is missing, too large, not text, or a device or a pipe, which may never end.
    """
    path = Path(path)
    try:
        if not path.is_file():
            reason = "a folder or a special file" if path.exists() else "no such file"
            raise InputError(f"{path}: expected a file, got {reason}", option=option)
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise InputError(f"{path}: expected at most {MAX_FILE // MIB} MiB, got more", option=option)
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{str(path)[:300]} cannot be read: {reason}", option=option) from error


def check_torch_file(path: Path) -> None:
    """`CheckpointError` for a file that `torch.load` would take much more memory for than its size.

    torch.save stores every tensor once, without compression, and `weights_only` allows `bytearray(10**10)`.
    What is wrong with the file in other ways is left to torch.
    """
    with path.open("rb") as file:
        packed = file.read(4) == b"PK\x03\x04"  # as torch tells the two formats apart
        file.seek(0)
        if packed:
            _check_archive(path, file)
        else:
            for _ in range(PICKLES):
                if not _check_pickle(path, file):
                    break


ZIP_END = 22  # bytes of the last record of an archive without a comment
PICKLES = 5  # before the data of a file in the format of torch 1.5 and older


def _check_archive(path: Path, file: BinaryIO) -> None:
    expected = f"{path}: expected a file as torch.save writes it, got"
    file.seek(-min(ZIP_END, path.stat().st_size), os.SEEK_END)
    if not file.read().startswith(b"PK\x05\x06"):  # readers would search for the directory, each its own way
        raise CheckpointError(f"{expected} an archive with something after its end")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise CheckpointError(f"{expected} compressed entries")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise CheckpointError(f"{expected} entries that are larger than the file")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                with archive.open(entry) as opened:
                    _check_pickle(path, opened)


def _check_pickle(path: Path, file: IO[bytes]) -> bool:
    """Whether there is a whole pickle; `CheckpointError` if it asks for memory that weights never need."""
    try:
        for operation, argument, _ in pickletools.genops(file):
            if operation.name == "GLOBAL" and str(argument).endswith(" bytearray"):
                raise CheckpointError(f"{path}: expected tensors, got a bytearray, which may have any size")
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, CheckpointError):
            raise
        return False
    return True


def unpacked_limit(path: Path, least: int = MIB) -> int:
    """Bytes that a compressed file may unpack to: more than `MAX_RATIO` times its size is a bomb."""
    return max(least, MAX_RATIO * path.stat().st_size)


def raw_blocks(path: Path) -> Iterator[bytes]:
    """Read the lines of a row file, plain or compressed, many at a time, without an unfinished last one."""
    packed = path.suffix == ".gz"
    limit = MAX_UNPACKED
    if packed:
        limit = min(limit, unpacked_limit(path))
    total, rest = 0, b""
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            while data := file.read(BLOCK):
                total += len(data)
                data = rest + data
                end = data.rfind(b"\n") + 1
                block, rest = data[:end], data[end:]
                long = len(block) > MAX_LINE and max(map(len, block.split(b"\n"))) > MAX_LINE
                if long or len(rest) > MAX_LINE:
                    raise InputError(
                        f"{path}: expected rows of at most {MAX_LINE // MIB} MiB, got a longer one"
                    )
                if packed and block and total > limit:
                    raise InputError(
                        f"{path}: unpacks to more than {limit // MIB} MiB, which no run writes. If it is "
                        "yours, unpack it with gunzip."
                    )
                if block:
                    yield block
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}): it is damaged or incomplete") from error


def raw_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a row file one by one, without their ends."""
    for block in raw_blocks(path):
        yield from block.split(b"\n")[:-1]


@contextmanager
def damaged_files(*folders: str | Path) -> Iterator[None]:
    """Turn errors of computing with what these run folders hold into an `InputError` that names them.

    Files are checked as they are read. What is left are values that do not fit together, such as a severity
    that is not a number, which only the suite or metric they belong to can know.
    """
    try:
        yield
    except SteadygazeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        names = ", ".join(map(str, folders))
        raise InputError(
            f"{names}: the values in run.json, the rows or the samples do not fit together "
            f"({type(error).__name__}: {str(error)[:200]}). The files are damaged, or of another "
            "version; run the measurement again."
        ) from error


LARGEST = 1e15  # of a number in a row: sums of squares of many stay finite
MAX_DETAIL = 10**6  # numbers behind one value
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Text = Annotated[str, Field(max_length=MAX_LINE)]  # a bound makes pydantic refuse lone surrogates
T = TypeVar("T")


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class _Condition(_Record):
    model_config = ConfigDict(extra="forbid")

    suite: str
    name: str
    level: Number | str | list[Number] | None
    source: str = ""
    label: str = ""
    minor: bool = False


class _Quantity(_Record):
    model_config = ConfigDict(extra="forbid")

    name: str
    unit: str = ""
    better: str = "higher"
    label: str = ""
    scale: Number = 1.0
    digits: Annotated[int, Field(ge=0, le=20)] | None = None
    summary: str = ""
    low: Number | None = None
    high: Number | None = None
    combine: str = "mean"
    accuracy: bool


class _ImageSet(_Record):
    name: str
    images: Count
    hash: str = ""


class Settings(_Record):
    """`settings` of run.json: what defines the numbers."""

    kind: str = "verify"
    model: str = ""
    weights: str = ""
    seed: int = 0
    versions: dict[str, str] = {}
    data: str = ""
    checkpoint: str | None = None
    preprocessing: dict[str, Any] = {}
    images: Count | None = None
    images_hash: str | None = None
    layout: str | None = None
    limit: Count | None = None
    batch: Count | None = None
    device: str = ""
    target: str = ""
    fill: str = ""
    salient: str | None = None
    metrics: list[str] = []
    ratios: list[Number] | None = None
    columns: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    suite: list[str] = []
    conditions: list[_Condition] = []
    quantities: list[_Quantity] = []
    corruptions: list[str] = []
    severities: list[Count] = []
    epsilons: list[Number] = []
    pgd_steps: Count | None = None
    notes: list[str] = []
    set_images: dict[str, Count] = {}
    shifts: list[_ImageSet] = []
    neighbors: list[_ImageSet] = []


class About(_Record):
    """`about` of run.json: what does not change the numbers. shards: their number when the run began."""

    command: str = ""
    began: str = ""
    shards: Annotated[int, Field(ge=1, le=10**6)] = 1
    classes: dict[str, str] = {}
    quantities: list[_Quantity] = []


class Run(_Record):
    """The content of run.json."""

    settings: Settings
    about: About = About()


def check_run(value: Any, where: str) -> dict[str, Any]:
    """Return run.json as it was read, if it is valid; its keys are those that were written."""
    try:
        read_record(Run, value, where)
    except InputError as error:
        raise InputError(f"{error}. The file is damaged, or was written by another version.") from error
    return {"about": {}, **value}


def check_complete(runs: Sequence[Mapping[str, Any]], folders: Sequence[str | Path]) -> None:
    """Raise InputError unless each run.json states which model was measured, with which seed and versions."""
    for run, folder in zip(runs, folders, strict=True):
        missing = [name for name in ("model", "weights", "seed", "versions") if name not in run["settings"]]
        if missing:
            raise InputError(f"{folder}/run.json: the settings have no {', '.join(missing)}")


def read_record(kind: type[T], value: Any, where: str) -> T:
    """Return JSON as an instance of this dataclass or model; where: the file, for errors."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(f"{where}: {_words(error)}") from error


def _words(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return f"{place}: {first['msg']}, got {repr(first['input'])[:80]}"


MATCHING = ("model", "weights", "seed")  # keys of a row that have the values of run.json


class _Unreadable(_Record):
    """A line about an image that could not be used."""

    image: Text
    unreadable: Text


class _Row(_Record):
    """A row; keys that it need not have are texts if they are there."""

    image: Text
    metric: Text
    value: Number | None
    detail: Annotated[list[Number | None], Field(max_length=MAX_DETAIL)] | None = None
    model: Text = ""
    weights: Text = ""
    method: Text = ""
    score: Text = ""
    setting: Text = ""
    note: Text = ""
    flag: Text = ""
    content: Text = ""
    seed: int = 0


class _Replacement(_Record):
    """A line about an image whose file was replaced."""

    image: Text
    content: Text
    version: int


def check_row(row: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless this is a row of a run with these settings, or names an unreadable image."""
    _check(_Unreadable if isinstance(row, dict) and "unreadable" in row else _Row, row)
    if "unreadable" in row:
        return
    for name in ("setting",) if settings.get("kind") == "stress" else ("method", "score"):
        if settings and name not in row:
            raise ValueError(f"it has no {name}")
    for name in MATCHING:
        if name in row and name in settings and row[name] != settings[name]:
            raise ValueError(
                f"{name} is {str(row[name])[:40]!r}, that of run.json {str(settings[name])[:40]!r}: it is "
                "a row of another run"
            )


def check_replacement(mark: Any) -> None:
    """Raise ValueError unless this is a line about an image whose file was replaced."""
    _check(_Replacement, mark)


def _check(kind: type[BaseModel], value: Any) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        raise ValueError(_words(error)) from error
