"""What users state about a model of their own: class names, image size, normalization, arguments."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import nn
from typer.testing import CliRunner

import steadygaze as sg
from helpers.wrapped import Lit
from steadygaze.cli import app
from steadygaze.loading.options import read_class_names

ROOT = Path(__file__).parents[2]
NAMES = ("bird", "cat", "dog")
PLAIN = {"image_size": 64, "mean": (0, 0, 0), "std": (1, 1, 1)}  # a model that normalizes its images itself


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A ViT of three classes, trained for images of 64 pixels."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in NAMES:
        (tmp_path / "data" / name).mkdir(parents=True)
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / name / "one.png")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("names.txt", "bird\ncat\ndog\n"),
        ("names.json", '["bird", "cat", "dog"]'),
        ("names.json", '{"2": "dog", "0": "bird", "1": "cat"}'),
        ("names.json", '{"cat": 1, "dog": 2, "bird": 0}'),
    ],
)
def test_class_names_from_a_file(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    assert read_class_names(tmp_path / file) == NAMES


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("names.txt", "", "empty file"),
        ("names.json", '{"1": "a", "5": "b"}', r"indices 0\.\.1, each once"),
        ("names.json", "[1, 2]", "a JSON list of names"),
        ("names.json", "[", "one name per line or JSON"),
    ],
)
def test_unusable_files_of_class_names(tmp_path: Path, file: str, content: str, message: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(sg.InputError, match=message) as error:
        read_class_names(tmp_path / file)
    assert error.value.option == "class_names"


def test_a_model_by_name_with_what_is_stated(checkpoint: Path) -> None:
    stated: dict[str, Any] = {"image_size": 64, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    loaded = sg.load_model("vit_tiny_patch16_224", checkpoint, class_names=NAMES, **stated)
    assert loaded.size == (64, 64) and loaded.mean == (0.1, 0.2, 0.3) and loaded.std == (0.4, 0.5, 0.6)
    images = loaded.preprocess(Image.new("RGB", (100, 80)))[None]
    assert sg.explain(loaded, images, target="dog", method="ixg").scores.shape == (1, 4, 4)
    same = sg.load_model("vit_tiny_patch16_224", checkpoint, model_kwargs={"img_size": 64})
    assert same.weights_hash == loaded.weights_hash and same.size == (64, 64)


def test_wrong_numbers_are_refused(checkpoint: Path) -> None:
    with pytest.raises(sg.InputError, match=r"expected 3 class names.*got 2"):
        sg.load_model("vit_tiny_patch16_224", checkpoint, image_size=64, class_names=["a", "b"])
    with pytest.raises(sg.InputError, match="three numbers"):
        sg.load_model("vit_tiny_patch16_224", checkpoint, image_size=64, mean=[0.5])
    with pytest.raises(sg.InputError, match="a module, which is built already"):
        sg.load_model(nn.Linear(2, 2), model_kwargs={"depth": 2})


def test_a_module_of_ones_own_needs_its_preprocessing() -> None:
    model = Lit(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=3)).eval()
    with pytest.raises(sg.InputError, match="Give image_size="):
        sg.load_model(model)
    loaded = sg.load_model(model, **PLAIN, class_names=NAMES)
    assert loaded.size == (64, 64) and sg.explain(loaded, torch.rand(1, 3, 64, 64), method="gae").scores.any()


def test_a_forward_of_ones_own_is_part_of_what_is_loaded() -> None:
    model = Lit(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=3)).eval()
    loaded = sg.load_model(model, **PLAIN, forward=lambda m, x: m(x).flip(1))
    images = torch.rand(2, 3, 64, 64)
    assert torch.allclose(sg.explain(loaded, images, method="gae").logits, model(images).flip(1))


def test_a_head_of_several_layers_is_named(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    model.head = nn.Sequential(nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3))
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    with pytest.raises(
        sg.errors.CheckpointError, match=r"several layers \(head\.0\.weight.*load_model\(module"
    ):
        sg.load_model("vit_tiny_patch16_224", tmp_path / "mlp.safetensors", image_size=64)
    other = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    other.head = nn.Sequential(nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3))
    loaded = sg.load_model(other, tmp_path / "mlp.safetensors", image_size=64)
    images = torch.rand(1, 3, 64, 64)
    assert torch.allclose(sg.explain(loaded, images, method="ixg").logits, model.eval()(images), atol=1e-5)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_command_line_takes_and_records_the_options(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    model = ["--model", "vit_tiny_patch16_224", "--checkpoint", str(checkpoint), "--image-size", "64"]
    normalization = ["--mean", "0.1,0.2,0.3", "--std", "0.5,0.5,0.5"]
    names = ["--class-names", str(tmp_path / "names.txt")]
    out = ["--method", "ixg", "--out", str(tmp_path / "seen")]
    result = run("explain", str(data / "dog"), *model, *normalization, *names, "--target", "dog", *out)
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "seen" / "manifest.json").read_text())
    assert (
        manifest["model"]["mean"] == "[0.1, 0.2, 0.3]"
        and manifest["images"][0]["targets"][0]["name"] == "dog"
    )


@pytest.mark.full
def test_folder_names_are_class_names_and_other_options_do_not_resume(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    model = ["--model", "vit_tiny_patch16_224", "--checkpoint", str(checkpoint), "--data", str(data)]
    options = ["--methods", "ixg", "--metrics", "deletion_accuracy", "--out", str(tmp_path / "run")]
    result = run("verify", *model, "--model-kwargs", "img_size=64", *options)
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["model_options"] == {"model_kwargs": "{'img_size': 64}"}
    again = run("verify", *model, "--model-kwargs", "img_size=64", *options)
    assert again.exit_code == 0, again.output
    other = run("verify", *model, "--model-kwargs", "img_size=64", "--mean", "0.1,0.2,0.3", *options)
    assert other.exit_code != 0
    kept = run(
        "stress", *model, "--image-size", "64", "--suites", "occlusion", "--out", str(tmp_path / "stress")
    )
    assert kept.exit_code == 0, kept.output


def test_a_module_of_no_known_library_needs_its_normalization_and_as_many_names_as_outputs() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=5)
    outer = torch.nn.Sequential(torch.nn.Identity(), vit)
    assert sg.load_model(outer, **PLAIN, class_names=list("abcde")).class_names == tuple("abcde")
    with pytest.raises(sg.InputError, match=r"expected 5 class names.*got 1"):
        sg.load_model(outer, **PLAIN, class_names=["a"])
    with pytest.raises(sg.InputError, match="mean: expected the normalization"):
        sg.load_model(outer, image_size=64)
    with pytest.raises(sg.InputError, match="std: expected the normalization"):
        sg.load_model(outer, image_size=64, mean=(0, 0, 0))
    with pytest.raises(sg.InputError, match="std: expected three numbers above 0"):
        sg.load_model(outer, image_size=64, mean=(0, 0, 0), std=(0, 0, 0))
    own = sg.load_model(timm.create_model("vit_base_patch16_siglip_224", img_size=64, depth=1), image_size=64)
    assert own.mean == (0.5, 0.5, 0.5)


def test_a_transformers_folder_without_an_image_processor_takes_what_is_stated(tmp_path: Path) -> None:
    size = {"image_size": 32, "patch_size": 8, "hidden_size": 24, "intermediate_size": 24}
    config = transformers.ViTConfig(**size, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(sg.errors.CheckpointError, match="Give image_size, mean and std"):
        sg.load_model(str(tmp_path))
    loaded = sg.load_model(str(tmp_path), image_size=32, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert loaded.size == (32, 32) and loaded.std == (0.25,) * 3
    assert sg.load_model(str(tmp_path), preprocess=loaded.preprocess).preprocess == loaded.preprocess


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"embed_dim": 16, "num_heads": 2, "depth": 1}),
        ("deit_tiny_distilled_patch16_224", {"embed_dim": 16, "num_heads": 2, "depth": 1}),
        ("beit_base_patch16_224", {"embed_dim": 16, "num_heads": 2, "depth": 1}),
    ],
)
def test_a_checkpoint_is_loaded_at_another_image_size(name, options, tmp_path):
    """As timm loads its own pretrained weights: only position embeddings change, by interpolation."""
    model = timm.create_model(name, num_classes=3, **options)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = sg.load_model(name, tmp_path / "model.safetensors", image_size=112, model_kwargs=options)
    assert loaded.preprocess(Image.new("RGB", (200, 150))).shape == (3, 112, 112)
    assert loaded.model(torch.zeros(1, 3, 112, 112)).shape == (1, 3)
    assert torch.equal(loaded.model.state_dict()["head.weight"], model.state_dict()["head.weight"])
    if hasattr(model, "pos_embed") and model.pos_embed is not None:
        wanted = resample_abs_pos_embed(model.pos_embed, [7, 7], num_prefix_tokens=model.num_prefix_tokens)
        assert torch.allclose(loaded.model.pos_embed, wanted, atol=1e-6)
