"""The scripts for SLURM and Kubernetes run as their schedulers would run them: two shards of one run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import steadygaze as sg
from helpers.runs import image_folder, rows_of

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[1] / "examples"
METHODS = "rollout"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What a node has: a shell, and a `python` with the package."""
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(sg.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
    }


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]


def test_one_shard_by_slurm_and_one_by_kubernetes(tmp_path: Path, environment: dict[str, str]) -> None:
    yaml = pytest.importorskip("yaml")
    data, out = image_folder(tmp_path / "data"), tmp_path / "run"
    words = ["--model", "embedded", "--data", str(data), "--methods", METHODS, "--out", str(out)]
    array = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2"}
    run(["bash", str(EXAMPLES / "slurm.sbatch"), *words], environment | array)

    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert job["kind"] == "Job" and job["spec"]["completionMode"] == "Indexed"
    container = job["spec"]["template"]["spec"]["containers"][0]
    stated = {one["name"]: one["value"] for one in container["env"]}
    assert stated["SHARDS"] == str(job["spec"]["completions"])
    own = {"SHARDS": "2", "MODEL": "embedded", "DATA": str(data), "METHODS": METHODS, "OUT": str(out)}
    assert own.keys() == stated.keys()
    index = {"JOB_COMPLETION_INDEX": "1"}  # what an indexed job sets in each pod
    run([*container["command"], *container["args"]], environment | stated | own | index)

    assert [path.name for path in sorted(out.glob("rows*"))] == [
        "rows-00000of00002-00000.jsonl",
        "rows-00001of00002-00000.jsonl",
    ]
    sg.verify("embedded", data, methods=[METHODS, "random"], out=tmp_path / "whole")
    assert rows_of(out) == rows_of(tmp_path / "whole")


def test_slurm_outside_of_an_array_is_refused(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sbatch"), "-o"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode and "sbatch --array" in done.stderr
