"""The embedded model can be trained in pieces: a killed run, started again, ends with the very same
weights."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

SCRIPT = Path(__file__).parents[2] / "tools" / "train_embedded.py"
CLASSES = [f"class{number}" for number in range(10)]


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Random images: eight per class to learn from, one per class to test."""
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 1)):
        for name in CLASSES:
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                    folder / f"{number}.png"
                )
    return tmp_path / "images"


def command(image_folder: Path, folder: Path, epochs: int = 3) -> list[str]:
    options = f"--epochs {epochs} --batch 8 --threads 1 --save-every 1".split()
    return [
        str(SCRIPT),
        "--data",
        str(image_folder),
        "--out",
        str(folder / "out"),
        "--work",
        str(folder),
        *options,
    ]


def start(image_folder: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command(image_folder, folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], None]]:
    """Run the script inside this process, which spares the imports, and leave torch as it was."""

    def run(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield run
    torch.set_num_threads(threads)


@pytest.mark.full
def test_killed_run_goes_on_to_the_same_weights(
    image_folder: Path,
    tmp_path: Path,
    run_here: Callable[[list[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed = start(image_folder, tmp_path / "killed")
    assert killed.stdout is not None
    said = killed.stdout.readline()
    killed.kill()  # SIGKILL, long before the last of the 30 steps
    killed.communicate(timeout=1800)
    assert killed.returncode != 0
    assert said.startswith("epoch 1/3")

    run_here(command(image_folder, tmp_path / "killed"))
    said = capsys.readouterr().out
    assert said.startswith("resuming at step ")
    assert 10 <= int(said.split()[3]) < 30

    run_here(command(image_folder, tmp_path / "unbroken"))
    first, second = (
        load_file(tmp_path / run / "out" / "embedded.safetensors") for run in ("unbroken", "killed")
    )
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)

    about = json.loads((tmp_path / "killed" / "out" / "embedded.json").read_text(encoding="utf-8"))
    assert about["classes"] == CLASSES
    VisionTransformer(**about["arguments"]).half().load_state_dict(second, strict=True)

    with pytest.raises(SystemExit, match="other settings"):
        run_here(command(image_folder, tmp_path / "unbroken", epochs=2))
