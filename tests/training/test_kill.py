"""A training run that is killed at any moment goes on, and ends with the very weights and the very log of an
unbroken one.

Run as a script, this file is the run that gets killed: everything is imported once, then each attempt is a
fork that trains, slowly where it writes, until SIGKILL ends it. Another part fills the disk in the middle of
a checkpoint: by a limit on the size of files.
"""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = 4


def launched(*words: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, __file__, *words], env=env, capture_output=True, text=True, timeout=1800
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What the script told: of the full disk, and of the kills where there is fork."""
    done = launched(str(tmp_path_factory.mktemp("runs")))
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_killed_at_any_moment(found):
    told = found[1]
    assert told["kills"] >= KILLS and told["within a write"] > 0, (
        "no kill struck within a write: the test proves less than it says"
    )
    assert told["resumed in the middle"] > 0


def test_a_full_disk_leaves_the_checkpoint_before(found):
    told = found[0]
    assert "could not be written" in told["message"] and "untouched" in told["message"]
    assert "model.safetensors could not be written" in told["weights"]
    assert told["step before"] == told["step after"] == 2 and told["parts"] == []
    assert told["same"], "once there is room, the run goes on to the weights of an unbroken one"


def asked(data: Path):
    from helpers.training import MODEL
    from steadygaze.training.recipe import make_recipe

    return make_recipe(
        {
            "model": {
                "name": "vit_tiny_patch16_224",
                "arguments": MODEL | {"drop_path_rate": 0.2, "proj_drop_rate": 0.1},
            },
            "data": {"train": str(data), "test": str(data)},
            "augment": {"crop": "pad", "mixup": 0.8, "cutmix": 1.0, "erase": 0.3},
            "losses": {"cross_entropy": {"smoothing": 0.1}, "adl": {"form": "paper"}},
            "ema": {"decay": 0.9},
            "accumulate": 2,
            "epochs": 4,
            "batch": 4,
            "log_every": 2,
            "save_every": 1,
            "tensorboard": False,
        }
    )


def result(out: Path) -> tuple[bytes, list[dict[str, str]]]:
    rows = list(csv.DictReader((out / "log.csv").open()))
    return (out / "model.safetensors").read_bytes(), [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows
    ]


def main(folder: Path) -> None:
    import torch

    from helpers.training import image_folder
    from steadygaze.training import loop
    from steadygaze.training import run_files as files

    torch.set_num_threads(1)
    recipe = asked(image_folder(folder / "data"))
    loop.train(recipe, folder / "unbroken")
    wanted = result(folder / "unbroken")
    full(folder, recipe, wanted, loop, files)
    if hasattr(os, "fork"):
        kill(folder, recipe, wanted, loop, files)


def kill(folder, recipe, wanted, loop, files) -> None:
    from steadygaze import files as atomic

    chance, counts, runs = random.Random(0), {"kills": 0, "within a write": 0, "resumed in the middle": 0}, 0
    began = time.monotonic()
    loop.train(recipe, folder / "warm")
    whole = time.monotonic() - began
    real = os.fsync

    def kills_itself_at(number: int):
        """fsync that ends the process between the writing of a checkpoint and its renaming."""
        left = [number]

        def fsync(file):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(file)

        return fsync

    while counts["kills"] < KILLS:
        runs += 1
        out = folder / f"broken{runs}"
        while True:
            within = counts["kills"] < KILLS and counts["kills"] % 2 == 0
            fsync = kills_itself_at(chance.randrange(1, 5) if within else 0)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    atomic.os = type("os", (), {**vars(os), "fsync": staticmethod(fsync)})
                    loop.train(recipe, out)
                    code = 0
                finally:
                    os._exit(code)
            if counts["kills"] < KILLS and not within:
                time.sleep(chance.uniform(0.1, 0.8 * whole))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            counts["kills"] += 1
            counts["within a write"] += bool(list(out.glob("*.part")))
            counts["resumed in the middle"] += (out / "state.pt").exists()
        assert result(out) == wanted
    print(json.dumps(counts))


def full(folder, recipe, wanted, loop, files) -> None:
    """The size of files is limited to just below a checkpoint's: what torch writes then fails as on a full
    disk."""
    import resource

    import torch

    out = folder / "full"
    loop.train(recipe, out, stop_after=2)
    before = files.load_state(out / "state.pt")["step"]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((out / "state.pt").stat().st_size // 2, hard))
    message = ""
    try:
        loop.train(recipe, out)
    except files.TrainingStoppedError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    small = (
        out / "state.pt"
    ).stat().st_size // 8  # now the weights, which safetensors writes, do not fit either
    resource.setrlimit(resource.RLIMIT_FSIZE, (small, hard))
    told = ""
    try:
        files.save_weights(out / "model.safetensors", {"w": torch.zeros(small)}, {})
    except files.TrainingStoppedError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    after, parts = files.load_state(out / "state.pt")["step"], [p.name for p in out.glob("*.part")]
    loop.train(recipe, out)
    same = result(out) == wanted
    print(
        json.dumps(
            {
                "message": message,
                "step before": before,
                "step after": after,
                "weights": told,
                "parts": parts,
                "same": same,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
