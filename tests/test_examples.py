"""The examples run, as their docstrings say."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

EXAMPLES = sorted(path.stem for path in (Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ray_tasks":
        pytest.importorskip("ray", reason="needs the extra ray: pip install steadygaze[ray]")
        monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes the token of its cluster there
        monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15, which waits long on a busy machine
    monkeypatch.chdir(tmp_path)
    importlib.import_module(f"examples.{name}").main()
    assert capsys.readouterr().out
