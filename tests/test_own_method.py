"""docs/howto/own_method.md: its blocks run one after the other, and the table of the Trace is true."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.faithfulness.metric import METRICS
from steadygaze.methods.registry import METHODS
from steadygaze.trace.capture import Trace
from steadygaze.trace.query import Query

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "own_method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def registered():
    names = set(METHODS), set(METRICS)
    yield
    for registry, before in zip((METHODS, METRICS), names, strict=True):
        for name in set(registry) - before:
            registry.remove(name)


def test_the_page_runs(registered, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict = {}
    for block in BLOCKS:
        exec(block, names)
    out = capsys.readouterr().out
    assert out.count("torch.Size([2, 8, 8])") == 4
    assert len(names["rows"]) == 2
    model, images = names["model"], names["images"]
    once = sg.explain(model, images, target=3, method="occlusion", score="log_odds").scores
    own = sg.explain(model, images, target=3, method="leave_one_out").scores
    assert torch.allclose(once, own, atol=1e-4)


@pytest.mark.parametrize(("kind", "prefix"), [(Trace, "trace"), (Query, "query")])
def test_tables_and_examples_name_everything_public(kind: type, prefix: str) -> None:
    names = set(vars(kind)) | {field.name for field in fields(kind)}
    public = {name for name in names if not name.startswith("_")}
    tables = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert public == set(re.findall(rf"`{prefix}\.(\w+)", tables))
    tours = "\n".join(block for block in BLOCKS if "tour" in block)
    assert public == set(re.findall(rf"\b{prefix}\.(\w+)", tours))


def test_a_plugin_file_registers_for_any_command(registered, tmp_path: Path) -> None:
    file = tmp_path / "plugin_of_test.py"
    file.write_text(BLOCKS[0])
    done = CliRunner().invoke(app, ["methods", "--plugin", str(file)])
    assert done.exit_code == 0 and "leave_one_out" in done.output
    missing = CliRunner().invoke(app, ["methods", "--plugin", str(tmp_path / "no.py")])
    assert missing.exit_code == 2 and "expected a Python file" in missing.output
    file.write_text("1 / 0")
    broken = CliRunner().invoke(app, [f"--plugin={file}", "methods"])
    assert broken.exit_code == 2 and "ZeroDivisionError" in broken.output
