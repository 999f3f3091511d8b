"""Folders stay small, files have one subject, and no name is a word that does not say what it holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "steadygaze"
MAX_FILES, MAX_LINES = 14, 400
VAGUE = {
    "added",
    "asked",
    "levels",
    "painting",
    "perturbation_runs",
    "quiet",
    "reading",
    "small",
    "stress_done",
    "utils",
    "wording",
}


def folders() -> Iterator[Path]:
    """The folders of the package that hold code."""
    for folder in (SOURCE, *sorted(SOURCE.rglob("*/"))):
        if any(folder.glob("*.py")):
            yield folder


@pytest.mark.parametrize("folder", list(folders()), ids=lambda folder: str(folder.relative_to(SOURCE.parent)))
def test_a_folder_has_few_files_of_moderate_length(folder: Path) -> None:
    files = sorted(file for file in folder.glob("*.py") if not file.stem.startswith("__"))
    assert len(files) <= MAX_FILES, [file.name for file in files]
    lengths = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_names_say_what_they_hold() -> None:
    names = {path.stem for path in SOURCE.rglob("*.py")} | {folder.name for folder in folders()}
    assert not names & VAGUE
