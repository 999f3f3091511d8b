"""One process writes a training run or a file of gates; a stranger's code runs on request only."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from helpers.training import content, recipe
from steadygaze.cli import app
from steadygaze.files import FileLock, lock_folder
from steadygaze.methods.diffmask import read_file
from steadygaze.training.diffmask import Trainer
from steadygaze.training.explainers import ExplainerRequest, ExplainerRun
from steadygaze.training.run_files import Log, TrainingStoppedError, prepare_folder, write_file

HOLD = """
import sys
from pathlib import Path
from steadygaze.files import FileLock
with FileLock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder():
    """Starts another process that holds the lock of a file."""
    source, started = str(Path(sg.__file__).parents[1]), []

    def hold(path: Path) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": source, "PATH": ""},
        )
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_process_on_a_training_run_is_refused(data, tmp_path, holder):
    out = tmp_path / "run"
    sg.train(recipe(data), out, stop_after=1)
    state = (out / "state.pt").read_bytes()
    leftover = out / ".state.pt.x.part"
    leftover.write_bytes(b"half")
    process = holder(out / ".lock")
    with pytest.raises(sg.InputError, match="another process is writing this run"):
        sg.train(recipe(data), out)
    assert (out / "state.pt").read_bytes() == state and leftover.exists(), "what it writes is left alone"
    process.kill()
    process.wait()
    assert sg.train(recipe(data), out).steps == 5
    with lock_folder(out):
        pass


def test_a_run_that_fails_gives_the_lock_back(data, tmp_path):
    sg.train(recipe(data), tmp_path / "run", stop_after=1)
    with pytest.raises(sg.InputError, match="run of another recipe"):
        sg.train(recipe(data, seed=1), tmp_path / "run")
    with lock_folder(tmp_path / "run"):
        pass


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")
    return folder


def gates(images: Path, out: Path, steps: int) -> ExplainerRun:
    options = {"batch": 2, "warmup": 1}
    return ExplainerRun(Trainer, ExplainerRequest("embedded", [images], out, options=options, steps=steps))


def test_a_second_process_on_a_file_of_gates_is_refused(images, tmp_path, holder):
    out = tmp_path / "new" / "m.safetensors"
    early = gates(images, out, 2)
    gates(images, out, 1).execute()
    before = out.read_bytes()
    process = holder(out.with_name(".m.safetensors.lock"))
    with pytest.raises(sg.InputError, match=r"m.safetensors: another process is training this file"):
        gates(images, out, 2).execute()
    assert out.read_bytes() == before
    process.kill()
    process.wait()
    early.execute()
    assert early.resumed == 1 and read_file(out)[1]["steps"] == 2, "what was written meanwhile is read"
    with FileLock(out.with_name(".m.safetensors.lock")):
        pass


# -- a stranger's code -----------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import ViTConfig, ViTForImageClassification
Path({marker!r}).touch()
class StrangeConfig(ViTConfig):
    model_type = "strange"
class StrangeModel(ViTForImageClassification):
    config_class = StrangeConfig
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder of a tiny ViT with code of its own, and the file that this code creates."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    labels = {0: "bright", 1: "dark"}
    config = transformers.ViTConfig(
        **sizes,
        image_size=16,
        patch_size=8,
        id2label=labels,
        label2id={name: index for index, name in labels.items()},
    )
    folder, marker = tmp_path / "model", tmp_path / "executed"
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    classes = {
        "AutoConfig": "strange.StrangeConfig",
        "AutoModelForImageClassification": "strange.StrangeModel",
    }
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "strange", "auto_map": classes}))
    return folder, marker


def test_training_executes_code_of_a_model_on_request_only(data, strange, tmp_path):
    folder, marker = strange
    given = content(data, epochs=1) | {"model": {"name": str(folder)}}
    with pytest.raises(sg.CheckpointError, match="would execute code that is part of the model"):
        sg.train(given, tmp_path / "run")
    assert not marker.exists()
    result = sg.train(given, tmp_path / "run", trust_remote_code=True)
    assert marker.exists() and result.steps == 3


@pytest.mark.parametrize("command", ["train", "diffmask"])
def test_the_commands_have_the_option(data, strange, tmp_path, command):
    folder, marker = strange
    if command == "train":
        toml = tmp_path / "recipe.toml"
        toml.write_text(f'epochs = 1\nbatch = 4\ntensorboard = false\n[model]\nname = "{folder}"\n')
        words = ["train", str(toml), "--set", f"data.train={data}", "--out", str(tmp_path / "run")]
    else:
        words = ["diffmask", "train", "--model", str(folder), "--data", str(data), "--steps", "1"]
        words += ["--set", "batch=2", "--out", str(tmp_path / "m.safetensors")]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and "--trust-remote-code" in refused.output.replace("\n", " ")
    assert not marker.exists()
    allowed = CliRunner().invoke(app, [*words, "--trust-remote-code"])
    assert allowed.exit_code in (0, 1) and marker.exists(), allowed.output


@pytest.mark.parametrize("name", ["log.csv", "state.pt", "tensorboard", ".lock"])
def test_training_does_not_write_through_a_link(data, tmp_path, name):
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    (out / name).symlink_to(outside)
    with pytest.raises(sg.InputError, match=r"is a link to .*, out of its folder"):
        sg.train(recipe(data, epochs=1), out, device="cpu")
    assert not outside.exists()


def test_a_full_disk_is_named_as_such(tmp_path):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() > 1000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with pytest.raises(TrainingStoppedError, match=r"state\.pt could not be written .*No space left"):
        write_file(tmp_path / "state.pt", lambda _: torch.save({"a": torch.zeros(10**6)}, Full()))


def test_a_log_that_is_removed_is_noticed_at_the_next_row(tmp_path):
    log = Log(tmp_path, ["step", "loss"], 0, tensorboard=False)
    (tmp_path / "log.csv").unlink()
    with pytest.raises(TrainingStoppedError, match="was removed while the run was writing it"):
        log.add({"step": 1, "loss": 0.5})


def test_a_run_is_not_resumed_from_another_initial_checkpoint(tmp_path):
    file, out = tmp_path / "w.pt", tmp_path / "out"
    file.write_bytes(b"a")
    out.mkdir()
    for _ in range(2):
        prepare_folder(out, {"seed": 0}, {}, "zero", str(file))
    file.write_bytes(b"b")
    with pytest.raises(sg.InputError, match=r"began with other weights: .*w\.pt has changed"):
        prepare_folder(out, {"seed": 0}, {}, "zero", str(file))
