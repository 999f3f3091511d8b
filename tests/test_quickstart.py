"""docs/quickstart.md and docs/howto/publish.md: every command and block runs, one after the other, in an
empty folder."""

import re
import shlex
import shutil
import textwrap
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadygaze.cli import app

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "quickstart.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = FENCE.findall(PAGE)
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
@pytest.mark.parametrize(
    ("page", "written"),
    [
        (
            "quickstart.md",
            "demo/index.html run/report.html robust/report.html card/card.html map.png methods.png",
        ),
        ("howto/publish.md", "run/table.csv run/table.md references.bib figures card/model-card.md"),
    ],
)
def test_every_block_runs_in_an_empty_folder(
    page: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for kind, block in FENCE.findall((DOCS / page).read_text(encoding="utf-8")):
        if kind == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            words, _, file = line.partition("#")[0].partition(" > ")
            command, *rest = shlex.split(words)
            assert command == "steadygaze"
            done = CliRunner().invoke(app, rest)
            assert done.exit_code == 0, f"{line}\n{done.output}"
            if file:
                Path(file.strip()).write_text(done.stdout, encoding="utf-8")
    assert not [file for file in written.split() if not (tmp_path / file).exists()]


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
