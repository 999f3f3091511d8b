"""Code that comes with a model is executed only on request, and transformers' own output stays away."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.errors import CheckpointError

transformers = pytest.importorskip("transformers")

CODE = """
from pathlib import Path
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
Path({marker!r}).touch()
class StrangeConfig(ViTConfig):
    model_type = "strange"
class StrangeModel(ViTForImageClassification):
    config_class = StrangeConfig
class StrangeProcessor(ViTImageProcessor):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny ViT as transformers saves it."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    path = tmp_path / "model"
    transformers.ViTForImageClassification(config).save_pretrained(path)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(path)
    return path


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def add_code(folder: Path, marker: Path, part: str) -> None:
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    if part == "processor":
        change(
            folder / "preprocessor_config.json",
            auto_map={"AutoImageProcessor": "strange.StrangeProcessor"},
            image_processor_type="StrangeProcessor",
        )
    else:
        auto_map = {
            "AutoConfig": "strange.StrangeConfig",
            "AutoModelForImageClassification": "strange.StrangeModel",
        }
        change(folder / "config.json", model_type="strange", auto_map=auto_map)


@pytest.mark.parametrize("part", ["config", "processor"])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_code_of_a_folder_is_not_executed(folder, marker, part, with_checkpoint):
    add_code(folder, marker, part)
    checkpoint = folder / "model.safetensors" if with_checkpoint else None
    with pytest.raises(CheckpointError, match="would execute code that is part of the model") as caught:
        sg.load_model(str(folder), checkpoint)
    assert caught.value.option == "trust_remote_code" and not marker.exists()


def test_code_is_executed_on_request(folder, marker):
    add_code(folder, marker, "config")
    assert sg.load_model(str(folder), trust_remote_code=True).model.config.model_type == "strange"
    assert marker.exists()


def test_a_folder_of_a_known_kind_needs_none_of_its_code(folder, marker):
    add_code(folder, marker, "config")
    change(folder / "config.json", model_type="vit")
    assert type(sg.load_model(str(folder)).model) is transformers.ViTForImageClassification
    assert not marker.exists()


def test_a_compiled_kernel_is_not_fetched(folder):
    change(folder / "config.json", attn_implementation="stranger/kernel")
    with pytest.raises(CheckpointError, match="compiled code of stranger/kernel"):
        sg.load_model(str(folder))


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 10**9}, {"num_hidden_layers": 10**9}, {"intermediate_size": 900_000, "hidden_size": 900},
     {"hidden_size": "8"}, {"hidden_size": 0}, {"id2label": 3}, {"id2label": {"0": "a", "7": "b"}},
     {"architectures": 3}, {"model_type": "no such"}, {"model_type": "bert"}, {"num_attention_heads": 0},
     {"patch_size": 0}],
    ids=str,
)  # fmt: skip
def test_hostile_configs_are_refused(folder, changes):
    change(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match="model"):
        sg.load_model(str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 3},
        {"size": {"height": "a"}},
        {"image_mean": None},
        {"resample": 99},
        {"image_std": [0, 0, 0]},
    ],
    ids=str,
)
def test_hostile_image_processors_are_refused_or_load(folder, changes):
    change(folder / "preprocessor_config.json", **changes)
    try:
        sg.load_model(str(folder))
    except CheckpointError as error:
        assert str(folder) in str(error)


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "model.safetensors"])
def test_damaged_files_of_a_folder_are_refused(folder, file):
    (folder / file).write_bytes((folder / file).read_bytes()[:40])
    with pytest.raises(CheckpointError, match="model"):
        sg.load_model(str(folder))


def test_the_command_line_names_its_option(folder, marker, tmp_path):
    add_code(folder, marker, "config")
    command = ["explain", str(tmp_path / "a.png"), "--model", str(folder), "--out", str(tmp_path / "out")]
    (tmp_path / "a.png").touch()
    done = CliRunner().invoke(app, command, input="y\n", env={"COLUMNS": "400"})
    assert done.exit_code != 0 and "--trust-remote-code" in done.output and not marker.exists()


@pytest.mark.parametrize(
    ("command", "offered"),
    [("explain", True), ("verify", True), ("stress", True), ("app", True), ("report", False)],
)
def test_commands_that_load_a_model_on_purpose_offer_the_option(command, offered):
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
    assert ("--trust-remote-code" in done.output) == offered


def test_the_loading_bar_of_transformers_is_not_shown(folder, capfd):
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.enable_progress_bar()
    try:
        sg.load_model(str(folder))
        assert logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    finally:
        if not before[0]:
            logging.disable_progress_bar()
    output = capfd.readouterr()
    assert output.out + output.err == ""
