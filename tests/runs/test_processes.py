"""Two processes of `accelerate launch` give the rows of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import steadygaze
from helpers.processes import two_processes
from helpers.runs import image_folder
from steadygaze.runs.rows import Rows

pytestmark = pytest.mark.full

SOURCE = Path(steadygaze.__file__).parents[1]


def verify(data: Path, out: Path, *launch: str) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        *launch,
        "-m",
        "steadygaze",
        "verify",
        "--model",
        "embedded",
        "--data",
        str(data),
    ]
    command += ["--methods", "gaze,rollout", "--batch-size", "5", "--ratios", "0.3,0.7", "--out", str(out)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)


def test_two_processes_give_the_rows_of_one(tmp_path):
    data = image_folder(tmp_path / "data")
    (data / "cat" / "broken.png").write_bytes(b"no image")
    one = verify(data, tmp_path / "one")
    two = verify(data, tmp_path / "two", *two_processes())
    assert one.returncode == 1, one.stderr  # the broken image
    assert "broken.png" in one.stdout and "broken.png" in two.stdout
    files = sorted((tmp_path / "two").glob("rows-*.jsonl"))
    assert [file.name for file in files] == ["rows-00000.jsonl", "rows-00001.jsonl"]
    assert all(file.stat().st_size for file in files), "a process did nothing"
    single = (tmp_path / "one" / "rows-00000.jsonl").read_text().splitlines()
    assert sorted(single) == sorted(line for file in files for line in file.read_text().splitlines())
    assert two.stdout.count("higher is better") == 1, "only the first process prints the ranking"
    same = [Rows.read(tmp_path / name).table(repeats=50).csv() for name in ("one", "two")]
    assert same[0] == same[1], "intervals must not depend on the order of rows"
