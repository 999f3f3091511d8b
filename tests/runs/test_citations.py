"""`steadygaze cite`: every method, metric and suite has its entries, which are those of docs/equations.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.runs.citations import _entry, _table
from steadygaze.runs.settings import Setting

ROOT = Path(__file__).parents[2]
OWN = {"calibrated", "random", "ground_truth", "mosaics"}  # no paper, and no section of their own


def test_the_file_is_made_of_the_bibliography() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "references.py", "--check"], check=False)
    assert done.returncode == 0, "run python tools/references.py"


def test_everything_that_can_be_named_is_known() -> None:
    table = _table()
    named = {info.name for info in (*sg.list_methods(), *sg.list_metrics())}
    assert not named - OWN - set(table["names"])
    assert not {info.name for info in sg.list_suites()} - set(table["suites"])
    for keys in (*table["names"].values(), *table["suites"].values(), *table["models"].values()):
        assert set(keys) <= set(table["references"])
    assert all(_entry(key).count("{") == _entry(key).count("}") for key in table["references"])


@pytest.mark.parametrize(
    ("settings", "entries", "comment"),
    [
        (
            {"columns": [["gae+plus:freeze=0.5", "logit"], ["mine", "logit"]], "metrics": ["saco"]},
            ["deit2021", "gae2021", "skipplus2024", "saco2024"],
            "% defined by steadygaze, or without a paper: mine",
        ),
        (
            {
                "conditions": [
                    Setting(*names).record() for names in (("corruptions", "fog", 3), ("attacks", "pgd"))
                ]
            },
            ["deit2021", "imagenet_c2019", "fgsm2015", "pgd2018"],
            "% corruptions",
        ),
    ],
)
def test_the_command(settings: dict, entries: list[str], comment: str, tmp_path: Path) -> None:
    facts = {"model": "deit_tiny_patch16_224", "weights": "00", **settings}
    kind = "stress" if "conditions" in settings else "verify"
    (tmp_path / "run.json").write_text(json.dumps({"kind": kind, "settings": facts}))
    (tmp_path / "rows-00000.jsonl").write_text("")
    done = CliRunner().invoke(app, ["cite", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("@software{steadygaze,") and comment in done.output
    software = done.output.partition("\n}")[0]
    assert "  year = {2026},\n  url = {https://github.com/steadygaze/steadygaze}," in software
    assert [line.partition("{")[2].rstrip(",") for line in done.output.splitlines() if line[:1] == "@"][
        1:
    ] == entries
