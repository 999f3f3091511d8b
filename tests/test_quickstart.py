"""docs/quickstart.md: every command and block runs, one after the other, in an empty folder."""

import re
import shlex
import shutil
import textwrap
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadygaze.cli import app

PAGE = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TABS = {
    name: textwrap.dedent(block)
    for name, block in re.findall(
        r'^=== "([^"]+)"\n\n    ```python\n(.*?)^    ```', PAGE, re.DOTALL | re.MULTILINE
    )
}


def test_nothing_of_the_page_is_left_out() -> None:
    assert [kind for kind, _ in BLOCKS] == ["sh", "python", "python", "sh", "sh", "sh"]
    assert list(TABS) == ["timm", "transformers", "torchvision", "open_clip", "own module"]
    assert PAGE.count("```") == 2 * (len(BLOCKS) + len(TABS)), "every fence is a block or a tab"
    for code in (*TABS.values(), *(block for kind, block in BLOCKS if kind == "python")):
        compile(code, "quickstart.md", "exec")


@pytest.mark.full
def test_every_block_runs_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "steadygaze"
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}"
    pages = ("demo/index.html", "run/report.html", "robust/report.html", "card/card.html")
    for file in (*pages, "map.png", "methods.png"):
        assert (tmp_path / file).is_file(), file


@pytest.mark.parametrize(
    "name", [name if name == "timm" else pytest.param(name, marks=pytest.mark.full) for name in TABS]
)
def test_each_tab_runs_by_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, no network: what it needs is the photograph of step 1."""
    if name in ("transformers", "open_clip"):
        pytest.importorskip(name)
    (tmp_path / "demo" / "photos" / "cat").mkdir(parents=True)
    shutil.copy(
        str(files("steadygaze") / "assets" / "demo" / "cat.png"), tmp_path / "demo" / "photos" / "cat"
    )
    monkeypatch.chdir(tmp_path)
    exec(TABS[name], {"__name__": "__main__"})
    assert (tmp_path / f"{name.partition(' ')[0]}.png").is_file()
