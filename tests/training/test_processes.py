"""Two processes of `accelerate launch` share each step: they end with the weights of one, but for the order
of sums."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import steadygaze as sg
from helpers.processes import two_processes
from helpers.training import MODEL, image_folder

pytestmark = pytest.mark.full

SOURCE = Path(__file__).parents[2] / "src"
RECIPE = """
epochs = 2
batch = 8
accumulate = 2
log_every = 1
tensorboard = false
[model]
name = "vit_tiny_patch16_224"
arguments = {arguments}
[data]
train = "{data}"
test = "{data}"
[optimizer]
name = "sgd"
lr = 0.1
[losses.relevance]
method = "gae"
[losses.adl]
tau = 1.0
[augment]
crop = "pad"
"""


def launched(recipe: Path, out: Path, masks: Path) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, *two_processes(), "-m", "steadygaze", "train", str(recipe), "--out", str(out)]
    command += ["--set", f"data.masks={masks}"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)


def test_two_processes_end_with_the_weights_of_one(tmp_path):
    data = image_folder(tmp_path / "data", each=8, masks=True)
    (data / "masks").rename(tmp_path / "masks")
    arguments = "{ " + ", ".join(f"{k} = {v}" for k, v in MODEL.items()) + " }"
    (tmp_path / "r.toml").write_text(RECIPE.format(arguments=arguments, data=data))
    sg.train(
        tmp_path / "r.toml", tmp_path / "one", changes={"data.masks": str(tmp_path / "masks")}, device="cpu"
    )
    two = launched(tmp_path / "r.toml", tmp_path / "two", tmp_path / "masks")
    assert two.returncode == 0, two.stderr[-2000:]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[key], b[key], rtol=1e-4, atol=1e-6) for key in a)
    assert two.stdout.count("model.safetensors") == 1, "only the first process reports"
    rows = [(tmp_path / name / "log.csv").read_text().splitlines() for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) == 5
