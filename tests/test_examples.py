"""The examples run as scripts from any folder, with the installed package alone."""

import ast
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
CHECKOUT = {"benchmarks", "examples", "tests", "tools"}  # folders that a wheel does not contain


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_needs_nothing_of_the_checkout(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert not imported & CHECKOUT
    assert "sys.path" not in text and "= Path(__file__)" not in text and "python -m examples" not in text


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "fiftyone_dataset":
        pytest.importorskip("fiftyone", reason="needs FiftyOne: pip install fiftyone")
    if name == "ray_tasks":
        pytest.importorskip("ray", reason="needs the extra ray: pip install steadygaze[ray]")
        monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes the token of its cluster there
        monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15, which waits long on a busy machine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out
