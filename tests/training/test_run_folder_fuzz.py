"""Run folders with hostile files, and training sets with images that do not decode."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from helpers.training import attempt, content, recipe
from steadygaze.cli import app

JSON = [
    b"",
    b"[]",
    b"3",
    b"{}",
    b'{"settings": 3}',
    b'{"settings": []}',
    b'{"settings": {"model": 3}}',
    b"\xff",
]
JSON += [b"[" * 100_000, b'{"settings": {"seed": NaN}}', b'{"settings": null}', b'{"settings": {"self": 1}}']
LOGS = [
    b"",
    b"\n",
    b"\0\n",
    b"a,b\n1,2\n",
    b"step,loss\nx,1\n",
    b"step\n\n",
    b"\xff\xfe\n",
    b'step\n"' + b"x" * 200_000 + b"\n",
]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    sg.train(recipe(data), out, stop_after=2)
    return out


def restored(finished: Path, out: Path) -> Path:
    out.mkdir()
    for file in finished.iterdir():
        if file.is_file():
            (out / file.name).write_bytes(file.read_bytes())
    return out


@pytest.mark.full
def test_files_of_a_run(data, finished, tmp_path):
    cases: list[tuple[str, bytes]] = [("train.json", text) for text in JSON]
    cases += [("log.csv", text) for text in LOGS]
    state, draw = (finished / "state.pt").read_bytes(), random.Random(2)
    cases += [("state.pt", state[: draw.randrange(len(state))]) for _ in range(8)]
    cases += [("state.pt", text) for text in (b"", b"PK\3\4", b"\x80\x02.", bytes(1000))]
    for number, (name, text) in enumerate(cases):
        out = restored(finished, tmp_path / str(number))
        (out / name).write_bytes(text)
        accepted = attempt(recipe(data), out, stop_after=3)
        assert not accepted or name == "log.csv", (name, text[:80])


@pytest.mark.full
def test_states_of_a_run(data, finished, tmp_path):
    """Checkpoints that torch reads, with other things in them."""
    state = torch.load(finished / "state.pt", weights_only=True)
    hostile: list[Any] = [3, {}, torch.zeros(2)]
    cases: list[Any] = [*hostile, [], None, "x"]
    cases += [{**state, key: value} for key in state for value in hostile if key != "name"]
    cases += [{**state, "step": step} for step in (-1, 10**9, True, 1.5, "2")]
    cases += [{**state, "sums": {"count": "x"}}, {**state, "sums": {3: 1.0}}]
    out = restored(finished, tmp_path / "run")
    harmless = 0
    for case in cases:
        torch.save(case, out / "state.pt")
        harmless += attempt(recipe(data), out, stop_after=2)
    assert harmless <= 2 * len(hostile)


def test_folders_in_place_of_files(data, finished, tmp_path):
    for name in ("train.json", "log.csv", "state.pt", ".lock"):
        out = restored(finished, tmp_path / name)
        (out / name).unlink()
        (out / name).mkdir()
        assert not attempt(recipe(data), out, stop_after=3), name


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_skipped_and_named(data, tmp_path, workers, caplog):
    folder = tmp_path / "data"
    for source in sorted(data.rglob("*.png")):
        target = folder / source.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    broken = folder / "bright" / "2.png"
    broken.write_bytes(b"no image")
    given = content(folder)
    given["data"]["workers"] = workers
    result = sg.train(given, tmp_path / "run")
    assert result.unreadable == [str(broken)] and result.steps == 6
    correct = 11 * result.top1
    assert correct == pytest.approx(round(correct), abs=1e-6), "11 images were tested"
    if not workers:
        assert sum("2.png" in text for text in caplog.messages) == 2, "once in training, once in testing"
    done = CliRunner().invoke(
        app,
        ["train", str(write_toml(tmp_path / "r.toml", given)), "--out", str(tmp_path / "again")],
    )
    assert done.exit_code == 1 and "skipped, unreadable" in done.output.replace("\n", " ")
    for file in folder.rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(sg.ImageError, match="none of the 12 images can be read"):
        sg.train(given, tmp_path / "none")


def write_toml(path: Path, given: dict) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in given.items() if not isinstance(value, dict)]
    for name, table in given.items():
        if isinstance(table, dict):
            lines.append(f"[{name}]")
            lines += [f"{k} = {json.dumps(v)}" for k, v in table.items() if not isinstance(v, dict)]
            for inner, values in ((k, v) for k, v in table.items() if isinstance(v, dict)):
                lines.append(f"[{name}.{inner}]")
                lines += [f"{k} = {json.dumps(v)}" for k, v in values.items()]
    path.write_text("\n".join(lines))
    return path
