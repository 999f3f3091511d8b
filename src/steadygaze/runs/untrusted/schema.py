"""What run.json and the rows of a run must look like. Keys that are not named here are kept as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steadygaze.errors import BadInput

LARGEST = 1e15  # of a number in a row: sums of squares of many stay finite
MAX_DETAIL = 10**6  # numbers behind one value
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**12)]
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
    accuracy: bool


class _ImageSet(_Record):
    name: str
    pictures: Count
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
    pictures: Count | None = None
    pictures_hash: str | None = None
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
    conditions: list[_Condition | str] = []
    quantities: list[_Quantity] = []
    corruptions: list[str] = []
    severities: list[Count] = []
    epsilons: list[Number] = []
    pgd_steps: Count | None = None
    notes: list[str] = []
    set_images: dict[str, Count] = {}
    shifts: list[_ImageSet] = []
    neighbours: list[_ImageSet] = []


class About(_Record):
    """`about` of run.json: what does not change the numbers. shards: their number when the run began."""

    command: str = ""
    began: str = ""
    shards: Annotated[int, Field(ge=1, le=10**6)] = 1
    classes: dict[str, str] = {}


class Run(_Record):
    """run.json."""

    settings: Settings
    about: About = About()


def check_run(value: Any, where: str) -> dict[str, Any]:
    """run.json as it was read, if it is one; its keys are those that were written."""
    _validate(Run, value, where)
    return {"about": {}, **value}


def check_complete(runs: Sequence[Mapping[str, Any]], folders: Sequence[str | Path]) -> None:
    """BadInput unless each run.json states which model was measured, with which seed and versions."""
    for run, folder in zip(runs, folders, strict=True):
        missing = [name for name in ("model", "weights", "seed", "versions") if name not in run["settings"]]
        if missing:
            raise BadInput(f"{folder}/run.json: the settings have no {', '.join(missing)}")


def read_record(kind: type[T], value: Any, where: str) -> T:
    """A record of JSON as this dataclass."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise BadInput(f"{where}: {_words(error)}") from error


def _validate(kind: type[BaseModel], value: Any, where: str) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        raise BadInput(
            f"{where}: {_words(error)}. The file is damaged, or was written by another version."
        ) from error


def _words(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return f"{place}: {first['msg']}, got {repr(first['input'])[:80]}"


TEXTS = ("model", "weights", "method", "score", "setting", "note", "flag", "content")
MATCHING = ("model", "weights", "seed")  # keys of a row that have the values of run.json


def check_row(row: Any, settings: Mapping[str, Any]) -> None:
    """ValueError unless this is a row of a run with these settings, or a line about an unreadable image."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a table, got {type(row).__name__}")
    _check_text(row, "image")
    if "unreadable" in row:
        _check_text(row, "unreadable")
        return
    _check_text(row, "metric")
    for name in ("setting",) if settings.get("kind") == "stress" else ("method", "score"):
        if settings and name not in row:
            raise ValueError(f"it has no {name}")
    for name in TEXTS:
        if name in row:
            _check_text(row, name)
    if not _is_number(row.get("value", "")):
        raise ValueError(f"value: expected a number or null, got {str(row.get('value', 'nothing'))[:40]}")
    detail = row.get("detail") or []
    if not isinstance(detail, list) or len(detail) > MAX_DETAIL or not all(map(_is_number, detail)):
        raise ValueError(f"detail: expected a list of numbers, got {str(detail)[:40]}")
    for name in MATCHING:
        if name in row and name in settings and row[name] != settings[name]:
            raise ValueError(
                f"{name} is {str(row[name])[:40]!r}, that of run.json {str(settings[name])[:40]!r}: it is "
                "a row of another run"
            )


def check_replacement(mark: Any) -> None:
    """ValueError unless this is a line about an image whose file was replaced."""
    if not isinstance(mark, dict):
        raise ValueError(f"expected a table, got {type(mark).__name__}")
    _check_text(mark, "image")
    _check_text(mark, "content")
    version = mark.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"version: expected a whole number, got {str(version)[:40]}")


def _check_text(row: dict[str, Any], name: str) -> None:
    text = row.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text, got {type(text).__name__}")


def _is_number(value: Any) -> bool:
    """A finite number that is not too large, or None."""
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
