"""Sample images that a run stores in its folder, so that a report needs neither the model nor the data.

RUN/samples/ holds `samples.json`, which `verify` and `stress` fill each in their own way, and JPEG files.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from PIL import Image

from steadygaze.errors import BadInput
from steadygaze.files import write_atomic
from steadygaze.runs.untrusted.json_files import read_bounded

FOLDER, INDEX = "samples", "samples.json"
SIDE = 448  # pixels of the longer side of a stored image: pages show it small, and whole on a click


def read_index(run: Path) -> dict[str, Any] | None:
    """The record of a run's samples; None if it has none (in memory, of the first version, or unfinished)."""
    path = run / FOLDER / INDEX
    try:
        record = json.loads(read_bounded(run, f"{FOLDER}/{INDEX}"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read ({error}): delete it, and the report has no images") from error
    if not isinstance(record, dict):
        raise BadInput(f"{path}: expected a table, got {type(record).__name__}")
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
        raise BadInput(f"{run / FOLDER / INDEX}: expected names of files in {FOLDER}, got {file[:200]!r}")
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
