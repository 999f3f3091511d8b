"""Errors say what is wrong in the words of the command line, or how to convert what was given."""

import warnings

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.errors import CheckpointError, InputError, UnsupportedModelError
from steadygaze.files import make_parent


def error_of(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    (folder / "0").mkdir()
    Image.new("RGB", (32, 32), "red").save(folder / "0" / "a.png")
    return folder


@pytest.mark.parametrize("name", ["./typo", "../typo/model", "/no/such/model", "~/typo", "a/b/c"])
def test_a_path_that_does_not_exist(name):
    with pytest.raises(InputError, match=f"^{name}: no such file or folder"):
        sg.load_model(name)


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_a_checkpoint_of_other_classes(tmp_path, library):
    if library == "timm":
        import timm

        name, model = (
            "vit_tiny_patch16_224",
            timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=5),
        )
    elif library == "torchvision":
        name, model = (
            "torchvision:vit_b_16",
            nn.ModuleDict({"heads": nn.ModuleDict({"head": nn.Linear(2, 5)})}),
        )
    else:
        from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, num_labels=5))
        name = str(tmp_path / "folder")
        model.save_pretrained(name)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(name)
    save_file(model.state_dict(), tmp_path / "five.safetensors")
    with pytest.raises(CheckpointError, match="num_classes=3: its classifier has 5 classes") as caught:
        sg.load_model(name, tmp_path / "five.safetensors", num_classes=3)
    assert caught.value.option == "num_classes"


def test_published_weights_of_other_classes():
    with pytest.raises(InputError, match="num_classes=37: embedded has 10 classes"):
        sg.load_model("embedded", num_classes=37)


def test_how_images_and_names_are_converted():
    loaded = sg.load_model("embedded")
    with pytest.raises(InputError, match=r"permute\(0, 3, 1, 2\)\.$"):
        sg.explain(loaded, torch.zeros(1, 32, 32, 3))
    with pytest.raises(InputError, match=r"permute\(0, 3, 1, 2\)\. Then convert uint8: images / 255"):
        sg.explain(loaded, torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"\(images / 255 - mean\) / std"):
        sg.explain(loaded, torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(UnsupportedModelError, match=r"sg\.load_model\('embedded'\)"):
        sg.adapt("embedded")


def test_masks_are_an_option_of_the_command_line(photos, tmp_path):
    shared = ["-m", "embedded", "-d", photos, "-o", tmp_path / "run"]
    text = error_of("verify", *shared, "--methods", "gae", "--metrics", "pointing_game")
    assert "--masks FOLDER" in text and "masks=" not in text


def test_corruptions_are_listed_once(photos, tmp_path):
    shared = ["-m", "embedded", "-d", photos, "-o", tmp_path / "run"]
    text = error_of("stress", *shared, "--suites", "corruptions", "--corruptions", "fooo")
    assert text.count("zoom_blur") == 1 and "--corruptions" in text


def test_folders_far_away_are_not_created(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="no such folder"):
        make_parent(tmp_path / "there" / "deep" / "report.html", option="out")
    with pytest.raises(InputError, match="no such folder"):
        make_parent(tmp_path.anchor / tmp_path.relative_to(tmp_path.anchor) / "a" / "b" / "c" / "report.html")
    assert not (tmp_path / "there").exists()
    make_parent(tmp_path / "there" / "report.html")
    make_parent(tmp_path / "here" / "a" / "b" / "report.html")
    assert (tmp_path / "there").is_dir() and (tmp_path / "here" / "a" / "b").is_dir()


def test_no_warning_of_torch_precedes_an_error(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError):
            sg.load_model("embedded", tmp_path / "script.pt")
