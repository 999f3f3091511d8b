"""Sample images that a run stores in its folder, so that a report needs neither the model nor the data.

RUN/samples/ holds `samples.json` and JPEG files. `verify` stores the images on which the leading method did
best and worst, with maps; `stress` one image under the conditions of each suite, and a thumbnail with the
attribution map of the predicted class for up to 64 images of the data, spread evenly over its classes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from steadygaze.errors import InputError
from steadygaze.files import write_atomic
from steadygaze.runs.ranking import Line
from steadygaze.untrusted import read_bounded, read_json, read_record

FOLDER, INDEX = "samples", "samples.json"
SIDE = 448  # pixels of the longer side of a stored image: pages show it small, and whole on a click


def read_index(run: Path) -> dict[str, Any] | None:
    """The record of a run's samples; None if it has none (in memory, or unfinished)."""
    path = run / FOLDER / INDEX
    try:
        record = read_json(run, f"{FOLDER}/{INDEX}", ": delete it, and the report has no images")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(record, dict):
        raise InputError(f"{path}: expected a table, got {type(record).__name__}")
    return record


def write_index(run: Path, record: dict[str, Any]) -> None:
    """Write the record, after the images that it names."""
    write_atomic(run / FOLDER / INDEX, json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def save_image(run: Path, name: str, image: Image.Image) -> str:
    """Store an image; returns its file name."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    file = f"{name}.jpg"
    write_atomic(folder / file, lambda opened: image.convert("RGB").save(opened, "JPEG", quality=86))
    return file


def data_address(run: Path, file: str) -> str:
    """A stored image as a data address, so that a page needs no other file; empty if the file is gone."""
    if Path(file).name != file:
        raise InputError(f"{run / FOLDER / INDEX}: expected names of files in {FOLDER}, got {file[:200]!r}")
    try:
        content = read_bounded(run, f"{FOLDER}/{file}")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(content).decode()


def thumbnail(image: Image.Image) -> Image.Image:
    """The image with its longer side at `SIDE` pixels."""
    scale = SIDE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.NEAREST if scale >= 3 else Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class MapSample:
    """An image, its values, and the files of the image and of one map for each method."""

    name: str
    title: str
    values: list[float]
    files: list[str]


@dataclass(frozen=True)
class VerifySamples:
    """Best and worst images of the first method by a metric, beside the second method."""

    methods: list[Line]
    metric: str
    best: list[MapSample]
    worst: list[MapSample]


def read_map_samples(run: Path) -> VerifySamples | None:
    """The samples of a run folder; None if it has none."""
    record = read_index(run)
    if record is None or "methods" not in record:
        return None
    samples = read_record(VerifySamples, record, str(run / FOLDER / INDEX))
    count = len(samples.methods)
    for sample in (*samples.best, *samples.worst):
        if len(sample.values) != count or len(sample.files) != count + 1:
            raise InputError(
                f"{run / FOLDER / INDEX}: expected {count} values and {count + 1} files of "
                f"{sample.name[:80]!r}, "
                f"got {len(sample.values)} and {len(sample.files)}"
            )
    return samples


@dataclass(frozen=True)
class ConditionSample:
    """One image under one condition: words and file. wide: a sheet of several images."""

    title: str
    file: str
    wide: bool = False


@dataclass(frozen=True)
class ImageSample:
    """A thumbnail of a clean image, the map of the predicted class (None: no map), and the prediction."""

    name: str
    label: int
    predicted: int
    probability: float
    file: str
    map_file: str | None = None


@dataclass(frozen=True)
class Samples:
    """What a run stored. image: the name of the image that is shown under conditions; method: of the maps."""

    image: str = ""
    method: str = ""
    conditions: Sequence[ConditionSample] = ()
    images: Sequence[ImageSample] = ()
    class_names: dict[int, str] = field(default_factory=dict)
    note: str = ""


def read_setting_samples(run: Path) -> Samples | None:
    """The samples of a run folder; None if it has none (a run that was killed early)."""
    record = read_index(run)
    if record is None:
        return None
    return read_record(Samples, record, str(run / FOLDER / INDEX))
