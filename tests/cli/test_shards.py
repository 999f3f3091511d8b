"""--shard on the command line: what is printed, and the files of `explain`."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.runs import image_folder, rows_of
from steadygaze.cli import app

MODEL = ("--model", "embedded")
COMMANDS = {
    "verify": ("--methods", "rollout", "--ratios", "0.5"),
    "stress": ("--suites", "corruptions", "--corruptions", "fog", "--severities", 1, "--num-workers", 0),
}


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("cli-shards") / "data")


@pytest.mark.full
@pytest.mark.parametrize("name", ["verify", "stress"])
def test_the_table_of_a_shard_says_that_it_is_a_part(data, tmp_path, name):
    words = (name, *MODEL, "--data", data, *COMMANDS[name], "--limit", 6, "--batch-size", 2)
    outputs = [run(*words, "--shard", f"{index}/4", "--out", tmp_path / "run") for index in range(4)]
    assert "shard 1/4: the numbers above are of this part of the run only" in outputs[1]
    assert f"All shards together: steadygaze report {tmp_path / 'run'}" in outputs[1]
    assert "2 images" in outputs[1] and "shard 3/4 has nothing to compute" in outputs[3]
    assert "shard 0" not in run(*words, "--out", tmp_path / "whole")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert "report.html" in run("report", tmp_path / "run")


def test_a_shard_that_is_none_is_refused_before_anything_is_written(data, tmp_path):
    words = ("verify", *MODEL, "--data", data, "--out", tmp_path / "run", "--shard", "4/4")
    assert "expected I/N with I from 0 to N-1" in run(*words, code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_explain_writes_the_files_of_one_job(data, tmp_path):
    (data / "cat" / "zz-broken.png").write_bytes(b"no image")
    words = ("explain", data / "cat", data / "truck", *MODEL, "--method", "gae,rollout", "--batch-size", 3)
    whole, out = tmp_path / "whole", tmp_path / "shards"
    run(*words, "--out", whole, code=1)
    for index in (1, 0):
        output = run(*words, "--out", out, "--shard", f"{index}/2", code=1 if index == 0 else 0)
        assert f"shard {index}/2" in output and f"scores-0000{index}of00002.npz" in output
    overlays = {path.name for path in whole.glob("*.png")} - {"grid.png"}
    parts = {f"{stem}-0000{index}of00002" for stem in ("grid", "scores", "manifest") for index in (0, 1)}
    assert {path.name for path in out.iterdir() if path.stem not in parts} == overlays
    assert {path.stem for path in out.iterdir()} >= parts
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in overlays)
    with np.load(whole / "scores.npz") as one:
        expected = dict(zip(one["names"], one["gae"], strict=True))
    shards = [np.load(out / f"scores-0000{index}of00002.npz") for index in (0, 1)]
    names = np.concatenate([shard["names"] for shard in shards])
    maps = np.concatenate([shard["gae"] for shard in shards])
    assert sorted(names) == sorted(expected) and len(set(names)) == 16
    assert all(np.array_equal(expected[name], one) for name, one in zip(names, maps, strict=True))
    manifests = [json.loads((out / f"manifest-0000{index}of00002.json").read_text()) for index in (0, 1)]
    assert [len(manifest["unreadable"]) for manifest in manifests] == [1, 0]
