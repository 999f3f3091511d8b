"""Four shards are killed at random moments and started again until all are done: the rows are those of one
undisturbed process, exactly, each once.

Run as a script, this file is the jobs: everything is imported once, then each attempt of a shard is a fork.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.runs import image_folder, rows_of

pytestmark = pytest.mark.full

SHARDS, KILLS = 4, 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
@pytest.mark.parametrize("kind", ["verify", "stress"])
def test_four_shards_killed_at_random(tmp_path, kind):
    source = Path(__import__("steadygaze").__file__).parents[1]
    env = {
        **os.environ,
        "PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parents[1]}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), kind], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == KILLS and counts["with rows"] > 0, "no kill came after the first row"


def main(folder: Path, kind: str) -> None:
    import torch

    import steadygaze as sg
    from steadygaze.runs.status import run_status

    torch.set_num_threads(1)
    data, model = image_folder(folder / "data"), sg.load_model("embedded")

    def measure(out: Path, shard: str | None = None) -> None:
        if kind == "verify":
            how = {"methods": ["ixg", "gaze", "rollout"], "metrics": ["insertion_aopc", "agreement"]}
            sg.verify(model, data, **how, ratios=[0.5, 0.9], batch_size=2, out=out, shard=shard)
        else:
            how = {"corruptions": "fog,jpeg_compression", "severities": "1,3"}
            sg.stress(model, data, "corruptions", **how, batch_size=2, out=out, shard=shard)

    def start(out: Path, index: int) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                measure(out, f"{index}/{SHARDS}")
                code = 0
            finally:
                os._exit(code)
        return child

    began = time.monotonic()
    measure(folder / "undisturbed")
    whole, wanted = time.monotonic() - began, rows_of(folder / "undisturbed")
    chance, kills, with_rows, attempts = random.Random(0), 0, 0, 0
    while kills < KILLS:
        attempts += 1
        out = folder / f"shards{attempts}"
        running = {start(out, index): index for index in range(SHARDS)}
        while running:
            if kills < KILLS:
                time.sleep(chance.uniform(0, 0.3 * whole))
                os.kill(chance.choice(sorted(running)), signal.SIGKILL)
            child, status = os.wait()
            index = running.pop(child)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0
                continue
            kills += 1
            with_rows += any(path.stat().st_size for path in out.glob(f"rows-{index:05d}of*"))
            running[start(out, index)] = index  # the same command again
        assert rows_of(out) == wanted
        (run,) = run_status(out)
        assert run.record()["done"] and len(run.shards) == SHARDS
        assert run.counts.rows == run.counts.rows_total == len(wanted) and run.counts.images == 24
    if kind == "verify":
        assert (out / "samples" / "samples.json").exists(), "the last shard stores the samples of the report"
    print(json.dumps({"kills": kills, "with rows": with_rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
