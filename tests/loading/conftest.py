"""Common to tests of models that strangers made."""

import io
from pathlib import Path

import pytest


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a stranger's code would create. Any question on standard input is answered with yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "executed"
