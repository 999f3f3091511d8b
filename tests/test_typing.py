"""What a type checker sees of `import steadygaze as sg` is what runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import steadygaze as sg

ROOT = Path(__file__).parents[1]
SCRIPT = """
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import steadygaze as sg

def use(model: nn.Module, images: Tensor) -> None:
    vit = sg.adapt(model)
    assert_type(vit, sg.ViT)
    assert_type(vit.embed(images), Tensor)
    attribution = sg.explain(model, images, method="gaze")
    assert_type(attribution, sg.Attribution)
    assert_type(attribution.scores, Tensor)
    assert_type(sg.explain(model, images, method=["gae", "cat"]), sg.Attributions)
    by_name: dict[str, sg.Attribution] = sg.explain(model, images, method=["gae", "cat"])
    paths: list[Path] = attribution.save("folder")
    names: list[str] = [info.name for info in sg.list_methods()]
    rows: sg.Rows = sg.verify(model, [(images, torch.zeros(1, dtype=torch.long))], methods=["gaze"])
    rows = sg.stress(model, [(images, torch.zeros(1, dtype=torch.long))], ["corruptions"])
    progress = sg.Progress("verify", 1, 2, "images")
    assert_type(progress.fraction, float | None)
    error: ValueError = sg.InputError("expected something else", option="masks")
    option: str | None = sg.InputError("expected something else").option
    sg.explain(model)  # wrong: no images
    sg.no_such_name  # wrong
"""


def run_mypy(script: str) -> list[str]:
    """What mypy says about a script, as LINE: MESSAGE; with the options of `make lint`: one cache."""
    path = ROOT / ".mypy_cache" / "steadygaze_user_script.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.stderr, done.stderr
    return re.findall(rf"^.*{path.name}:(.*)$", done.stdout, flags=re.MULTILINE)


@pytest.mark.full
def test_a_users_script_has_the_right_types() -> None:
    lines = [*SCRIPT.splitlines(), *(f"reveal_type(sg.{name})" for name in sg.__all__)]
    messages = run_mypy("\n".join(lines) + "\n")
    errors = [message for message in messages if " error: " in message]
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    assert {int(error.partition(":")[0]) for error in errors} == wrong, errors
    types = [found[1] for message in messages if (found := re.search(r'Revealed type is "(.*)"', message))]
    untyped = [name for name, kind in zip(sg.__all__, types, strict=True) if kind == "Any"]
    assert not untyped
