"""docs/quickstart.md: every command and block runs, one after the other, in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadygaze.cli import app

PAGE = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.full
def test_every_block_runs_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    assert [kind for kind, _ in BLOCKS] == ["sh", "python", "python", "sh", "sh", "sh"]
    for kind, block in BLOCKS:
        if kind == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "steadygaze"
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}"
    for file in ("demo/index.html", "map.png", "methods.png", "run/report.html", "robust/report.html"):
        assert (tmp_path / file).is_file(), file
