"""The notebooks of docs/tutorials run from top to bottom, and their stored outputs are complete."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from steadygaze.methods.registry import METHODS
from tools.run_tutorials import FOLDER, execute, read

pytestmark = pytest.mark.full

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FOREIGN_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|usr|opt|Users|private|var)/")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[list[str]]:
    """The forms of a cell's outputs: "stream", or the types of the data."""
    return [sorted(output.get("data", {"stream": ""})) for output in cell["outputs"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_gives_the_kinds_of_output_that_are_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))  # of the commands that it calls
    known = set(METHODS)
    stored = read(path)
    try:
        done = execute(stored)
    finally:
        for name in set(METHODS) - known:
            METHODS.remove(name)
    for before, after in zip(code_cells(stored), code_cells(done), strict=True):
        assert kinds(before) == kinds(after), "".join(before["source"])


def test_there_are_six_notebooks_with_small_outputs_and_no_foreign_paths() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == list("123456")
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 2_000_000
    for path in NOTEBOOKS:
        outputs = [output for cell in code_cells(read(path)) for output in cell["outputs"]]
        data = [output.get("data", {}) for output in outputs]
        assert any("image/png" in one or "text/html" in one for one in data), path.name
        texts = [str(output.get("text", "")) for output in outputs]
        texts += [str(one.get(kind, "")) for one in data for kind in ("text/html", "text/plain")]
        assert not [text for text in texts if FOREIGN_PATH.search(text) or "Traceback" in text], path.name
