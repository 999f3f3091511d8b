"""`steadygaze status`: done, running, died and waiting shards, and progress files of strangers."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from steadygaze.cli import app
from steadygaze.runs.shards import Shard, lock_run


def status(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["status", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Shards 0 and 2 of 4 are done."""
    folder = tmp_path_factory.mktemp("status")
    data = image_folder(folder / "data")
    (data / "airplane" / "0.png").write_bytes(b"no image")
    model = sg.load_model("embedded")
    for index in (0, 2):
        how = {"methods": "rollout", "ratios": [0.5], "batch_size": 3, "out": folder / "run"}
        sg.verify(model, data, shard=(index, 4), random=False, **how)
    return folder / "run"


def change(run: Path, index: int, **facts: object) -> None:
    """A progress file of shard `index`, like that of shard 0."""
    record = json.loads((run / "progress-00000of00004-00000.json").read_text())
    record |= {"shard": [index, 4], **facts}  # facts may state another shard
    (run / f"progress-{index:05d}of00004-00000.json").write_text(json.dumps(record))


def states(run: Path) -> list[str]:
    return [shard["state"] for shard in json.loads(status(run, "--json"))["runs"][0]["shards"]]


def test_done_and_not_started(run):
    output = status(run)
    assert "verify of embedded on data, 4 shards" in output and "maps/s" in output
    lines = {line.split()[0]: line for line in output.splitlines() if "/4" in line[:4]}
    assert "done" in lines["0/4"] and "6/6" in lines["0/4"] and "20/24" in lines["0/4"]
    assert "not started" in lines["1/4"] and "done" in lines["2/4"]
    assert "2/4 done" in output and "12/24" in output
    assert "unreadable images: 1; flagged maps: 0" in output
    assert max(map(len, output.splitlines())) <= 80
    record = json.loads(status(run, "--json"))["runs"][0]
    assert (
        record["images"] == 12 and record["rows"] == 44 and record["unreadable"] == 1 and not record["done"]
    )


def test_a_report_of_some_shards_says_so(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "not complete (2 of 4 shards not done)" in " ".join(result.output.split())
    assert (tmp_path / "page.html").exists()


def test_running_died_and_failed(run):
    now = time.time()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    half = {"state": "running", "units": 3, "units_total": 6, "resumed": 1, "began": now - 4, "updated": now}
    change(run, 1, **half, host=socket.gethostname(), pid=os.getpid())
    change(run, 3, **half, host=socket.gethostname(), pid=ended.pid)
    assert states(run) == ["done", "running", "done", "died"]
    output = status(run)
    assert "repeat the command of shard 3/4 to resume" in output and "last seen" in output
    running = next(line for line in output.splitlines() if line.startswith("1/4"))
    assert " 0.5 " in running and running.rstrip().endswith(" s"), "units a second and the time left"
    assert max(map(len, output.splitlines())) <= 80
    elsewhere = {"host": "another-machine", "pid": 1}
    change(run, 3, **half, **elsewhere)
    assert states(run)[3] == "running", "it gave a sign of life a moment ago"
    change(run, 3, **half | {"updated": now - 600}, **elsewhere)
    assert states(run)[3] == "died"
    with lock_run(run, Shard(3, 4)):
        assert states(run)[3] == "running", "its lock is held"
    change(run, 3, **half | {"state": "failed"}, error="RowsNotWrittenError: No space left on device")
    assert states(run)[3] == "failed" and "No space left on device" in status(run)
    for index in (1, 3):
        (run / f"progress-{index:05d}of00004-00000.json").unlink()


@pytest.mark.parametrize(
    "facts",
    [
        {"pid": "first"},
        {"units": -1},
        {"updated": float("nan")},
        {"shard": [4, 4]},
        {"counts": {"rows": "x"}},
    ],
)
def test_a_progress_file_of_a_stranger(run, facts):
    change(run, 1, **facts)
    path = run / "progress-00001of00004-00000.json"
    try:
        assert path.name in status(run, code=2)
    finally:
        path.unlink()


def test_a_folder_that_is_no_run(tmp_path):
    assert "is not a run folder" in status(tmp_path, code=2)
