"""Models by name, file and folder; nothing is downloaded."""

import dataclasses
import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

import steadygaze
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import CheckpointError, InputError, UnknownNameError
from steadygaze.loading import checkpoint as hub
from steadygaze.loading import torchvision as torchvision_models
from steadygaze.loading.checkpoint import fit, read_weights, weights_hash
from steadygaze.loading.load import list_models, load_model

NAME = "test_vit"  # the smallest ViT that timm registers


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(NAME, num_classes=7)


@pytest.fixture
def photo() -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((320, 240), Image.Resampling.BICUBIC)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def wrapped(weights: dict, kind: str) -> dict:
    return {
        "plain": weights,
        "model": {"model": weights, "epoch": 3},
        "state_dict": {
            "state_dict": {f"module.{name}": value for name, value in weights.items()},
            "optimizer": {},
        },
        "compiled": {"model": {f"_orig_mod.module.{name}": value for name, value in weights.items()}},
    }[kind]


@pytest.mark.parametrize("kind", ["plain", "model", "state_dict", "compiled"])
def test_checkpoints_in_common_wrappers(tmp_path, model, kind):
    torch.save(wrapped(model.state_dict(), kind), tmp_path / "weights.pth")
    loaded = load_model(NAME, tmp_path / "weights.pth")
    assert same(loaded.model, model), "the classifier's width comes from the file"
    assert loaded.source == "timm" and loaded.class_names is None and not loaded.model.training


def test_safetensors_and_half_precision(tmp_path, model):
    save_file(
        {name: value.half() for name, value in model.state_dict().items()}, tmp_path / "weights.safetensors"
    )
    loaded = load_model(NAME, tmp_path / "weights.safetensors")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert torch.allclose(loaded.model.cls_token, model.cls_token, atol=1e-3)


def test_missing_unexpected_and_clashing_tensors_are_named(tmp_path, model):
    weights = dict(model.state_dict())
    weights["stranger"] = weights.pop("cls_token")
    weights["norm.weight"] = torch.zeros(3)
    torch.save(weights, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError) as caught:
        load_model(NAME, tmp_path / "weights.pth")
    text = str(caught.value)
    assert "1 missing (cls_token)" in text and "1 unexpected (stranger)" in text
    assert "norm.weight: model (64,), file (3,)" in text and "weights.pth" in text


def test_a_clash_leaves_the_model_as_it_was(model):
    before = weights_hash(model)
    with pytest.raises(CheckpointError):
        fit(model, {"norm.weight": torch.zeros(64)}, "file")
    assert weights_hash(model) == before


def test_num_classes_against_the_file(tmp_path, model):
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="does not fit num_classes=5: its classifier has 7 classes"):
        load_model(NAME, tmp_path / "weights.pth", num_classes=5)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="execute code"):
        load_model(NAME, tmp_path / "evil.pth")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
def test_broken_and_empty_files(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match=name):
        read_weights(tmp_path / name)
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(tmp_path / "absent.pth")


def test_a_file_without_tensors(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="no tensors"):
        read_weights(tmp_path / "weights.pth")


def test_preprocessing_is_timms_own(tmp_path, photo):
    torch.save(
        timm.create_model("deit_tiny_patch16_224", depth=1, num_classes=1000).state_dict(), tmp_path / "w.pth"
    )
    with pytest.raises(CheckpointError, match="missing"):
        load_model("deit_tiny_patch16_224", tmp_path / "w.pth")
    whole = timm.create_model("deit_tiny_patch16_224")
    save_file(whole.state_dict(), tmp_path / "w.safetensors")
    loaded = load_model("deit_tiny_patch16_224", tmp_path / "w.safetensors")
    assert (
        loaded.mean == (0.485, 0.456, 0.406)
        and loaded.size == (224, 224)
        and loaded.preprocess.config["crop_pct"] == 0.9
    )
    small = photo.resize((320 * 248 // 240, 248), Image.Resampling.BICUBIC)
    left, top = round((small.width - 224) / 2), round((small.height - 224) / 2)
    seen = loaded.to_image(loaded.preprocess(photo))
    expected = np.asarray(small.crop((left, top, left + 224, top + 224)), int)
    assert np.abs(np.asarray(seen, int) - expected).max() <= 1
    assert (
        loaded.class_names is not None
        and len(loaded.class_names) == 1000
        and loaded.class_names[281] == "tabby, tabby cat"
    )
    assert loaded.class_index("Tabby Cat") == 281 and loaded.class_index("281") == 281
    with pytest.raises(UnknownNameError, match="Egyptian cat"):
        loaded.class_index("egyptian cap")


def test_the_embedded_model():
    loaded = load_model("embedded")
    about = json.loads((Path(steadygaze.__file__).parent / "assets" / "embedded.json").read_text())
    assert loaded.class_names == tuple(about["classes"]) and loaded.size == (32, 32)
    assert sum(p.numel() for p in loaded.model.parameters()) == about["training"]["parameters"] <= 3_000_000
    image = loaded.preprocess(Image.new("RGB", (64, 48), (255, 0, 128)))
    assert image.shape == (3, 32, 32)
    expected = (torch.tensor([1, 0, 128 / 255]) - torch.tensor(loaded.mean)) / torch.tensor(loaded.std)
    assert torch.allclose(image[:, 5, 5], expected, atol=1e-5)
    assert loaded.model(image[None]).shape == (1, 10)
    assert loaded.class_index("ship") == loaded.class_names.index("ship")


def test_a_name_that_two_classes_share():
    classes = ("crane", "crane", "polecat, fitch", "skunk, polecat", "missile", "shell, missile")
    loaded = dataclasses.replace(load_model("embedded"), class_names=classes)
    with pytest.raises(
        InputError,
        match=r"'Crane' is the name of 2 classes of embedded: 0 \(crane\), 1 \(crane\). Give the number",
    ):
        loaded.class_index("Crane")
    with pytest.raises(InputError, match=r"2 \(polecat, fitch\), 3 \(skunk, polecat\)"):
        loaded.class_index("polecat")
    assert (
        loaded.class_index("missile") == 4 and loaded.class_index("shell") == 5
    )  # a whole name goes before a part of one


def test_the_embedded_model_knows_an_airplane_and_a_ship():
    loaded = load_model("embedded")
    for name in ("airplane", "ship"):
        with Image.open(Path(steadygaze.__file__).parent / "assets" / "demo" / f"{name}.png") as photo:
            logits = loaded.model(loaded.preprocess(photo.convert("RGB"))[None])
        assert loaded.class_names is not None and loaded.class_names[int(logits.argmax())] == name


def test_torchvision_models(tmp_path, monkeypatch, photo):
    def small(name, weights, num_classes=1000):
        return torchvision.models.VisionTransformer(224, 32, 1, 2, 32, 64, num_classes=num_classes)

    monkeypatch.setattr(torchvision.models, "get_model", small)
    for count in (1000, 4):
        model = small("", None, count)
        torch.save(model.state_dict(), tmp_path / "w.pth")
        loaded = load_model("torchvision:vit_b_32", tmp_path / "w.pth")
        assert same(loaded.model, model) and loaded.source == "torchvision"
        assert (loaded.class_names is None) == (count == 4)
    published = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v
        for name, v in model.state_dict().items()
    }
    torch.save(published, tmp_path / "w.pth")
    assert len(published.keys() - model.state_dict().keys()) == 4
    assert same(load_model("torchvision:vit_b_32", tmp_path / "w.pth").model, model)
    preset = torchvision.models.ViT_B_32_Weights.DEFAULT.transforms()
    assert torch.equal(loaded.preprocess(photo), preset(photo))
    with pytest.raises(UnknownNameError, match="vit_b_16"):
        load_model("torchvision:vit_b_15")


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1"])
def test_torchvision_cnns(tmp_path, name):
    model = torchvision.models.get_model(name, weights=None, num_classes=5)
    old = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "w.pth")
    loaded = load_model(f"torchvision:{name}", tmp_path / "w.pth")
    assert same(loaded.model, model) and loaded.size == (224, 224) and loaded.class_names is None
    with pytest.raises(CheckpointError, match="missing"):
        torch.save(dict(list(old.items())[1:]), tmp_path / "w.pth")
        load_model(f"torchvision:{name}", tmp_path / "w.pth")


def test_names_of_old_torchvision_files():
    assert (
        torchvision_models.module_name("features.denseblock1.denselayer2.norm.1.weight")
        == "features.denseblock1.denselayer2.norm1.weight"
    )


def test_the_random_state_is_left_alone(tmp_path, model):
    torch.save(model.state_dict(), tmp_path / "w.pth")
    before = torch.get_rng_state()
    load_model(NAME, tmp_path / "w.pth")
    load_model("embedded")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def folder(tmp_path):
    """A tiny transformers classifier on disk."""
    transformers = pytest.importorskip("transformers")
    labels = {"id2label": {0: "ant", 1: "bee", 2: "cow"}, "label2id": {"ant": 0, "bee": 1, "cow": 2}}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **labels)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "hf")
    size = {"height": 32, "width": 32}
    processor = transformers.ViTImageProcessor(size=size, image_mean=[0.4] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_transformers_folder(folder, photo):
    loaded = load_model(str(folder))
    assert (
        loaded.source == "transformers"
        and loaded.class_names == ("ant", "bee", "cow")
        and loaded.size == (32, 32)
    )
    assert loaded.mean == (0.4, 0.4, 0.4)
    assert loaded.model(loaded.preprocess(photo)[None]).logits.shape == (1, 3)


def test_transformers_folder_without_a_head(folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig.from_pretrained(folder)
    for pooler in (True, False):  # a file without a pooler is not filled with a random one
        saved = transformers.ViTModel(config, add_pooling_layer=pooler)
        saved.save_pretrained(folder)
        loaded = load_model(str(folder))
        assert same(loaded.model, saved) and loaded.class_names is None
        assert (loaded.model.pooler is not None) == pooler


def test_transformers_folder_with_the_head_of_its_pretraining(folder):
    """An encoder of a masked autoencoder is loaded without its decoder."""
    transformers = pytest.importorskip("transformers")
    sizes = transformers.ViTConfig.from_pretrained(folder).to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    small = {f"decoder_{name}": 8 for name in ("hidden_size", "intermediate_size")}
    config = transformers.ViTMAEConfig(
        **{name: sizes[name] for name in names},
        **small,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=1,
    )
    saved = transformers.ViTMAEForPreTraining(config)
    saved.save_pretrained(folder)
    assert same(load_model(str(folder)).model, saved.vit)


def test_transformers_with_a_checkpoint(folder, tmp_path):
    source = load_model(str(folder))
    changed = {name: value + 1 for name, value in source.model.state_dict().items()}
    torch.save(changed, tmp_path / "w.pth")
    loaded = load_model(str(folder), tmp_path / "w.pth")
    assert torch.equal(loaded.model.state_dict()["classifier.bias"], changed["classifier.bias"])
    assert loaded.weights_hash != source.weights_hash


def test_transformers_with_a_file_that_it_wrote_itself(folder, tmp_path):
    """Files keep the names of older versions of transformers."""
    source = load_model(str(folder)).model
    assert same(load_model(str(folder), folder / "model.safetensors").model, source)
    torch.save({"stranger": torch.zeros(2)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"1 unexpected \(stranger\)"):
        load_model(str(folder), tmp_path / "w.pth")
    torch.save({name: value[:1] for name, value in source.state_dict().items()}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="of another shape"):
        load_model(str(folder), tmp_path / "w.pth")


def test_transformers_folder_without_an_image_processor(folder):
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json.*save_pretrained"):
        load_model(str(folder))


def test_a_folder_that_bears_the_name_of_a_timm_model(tmp_path, model, monkeypatch):
    torch.save(model.state_dict(), tmp_path / "w.pth")
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert same(load_model(NAME, "w.pth").model, model)


def offline(*args, **kwargs):
    assert constants.HF_HUB_OFFLINE, "no time is spent on retries where the hub's name does not resolve"
    raise OSError("cannot be reached\nmore lines")


@pytest.mark.parametrize("name", [NAME, "owner/some-vit"])
def test_without_a_network_the_error_names_the_way_out(monkeypatch, name):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(hub, "_resolves", lambda host: False)
    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", offline)
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(CheckpointError, match="Give a local file as checkpoint") as caught:
        load_model(name)
    assert "cannot be reached" in str(caught.value) and name in str(caught.value)
    assert before == constants.HF_HUB_OFFLINE


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="'vit_tiny_patch16_224'"):
        load_model("vit_tiny_patch16_225")


def test_a_device_that_is_not_there(monkeypatch):
    def missing(self, device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.nn.Module, "to", missing)
    with pytest.raises(InputError, match="'cpu' always can"):
        load_model("embedded", device="cuda:9")


def test_hash_is_over_sorted_names_and_bytes(model):
    stream = io.BytesIO()
    for name in sorted(model.state_dict()):
        stream.write(name.encode() + model.state_dict()[name].numpy().tobytes())
    assert weights_hash(model) == hashlib.sha256(stream.getvalue()).hexdigest()[:16]
    with torch.no_grad():
        model.norm.weight[0] += 1e-6
    assert weights_hash(model) != hashlib.sha256(stream.getvalue()).hexdigest()[:16]


def test_a_long_reason_of_the_hub_is_cut_between_words():
    with pytest.raises(CheckpointError) as told, hub.hub("owner/name"):
        raise OSError("reason " * 40)
    assert "(reason reason" in str(told.value) and "reason [...])" in str(told.value)


def test_a_module_of_timm_is_accepted(tmp_path, model, photo):
    torch.save(model.state_dict(), tmp_path / "w.pth")
    by_name, given = load_model(NAME, tmp_path / "w.pth"), load_model(model)
    assert given.model is model and given.name == NAME and given.source == "timm" and model.training
    assert torch.equal(given.preprocess(photo), by_name.preprocess(photo))
    assert given.weights_hash == by_name.weights_hash and given.preprocess == by_name.preprocess
    assert load_model(given) is given
    named = load_model(model, class_names=list("abcdefg"))
    assert named.class_index("c") == 2


def test_a_module_of_transformers_is_accepted(folder, photo):
    by_name = load_model(str(folder))
    given = load_model(by_name.model)
    assert given.class_names == ("ant", "bee", "cow") and given.source == "transformers"
    assert torch.equal(given.preprocess(photo), by_name.preprocess(photo))


def test_a_module_without_preprocessing_needs_one():
    module = torch.nn.Flatten()
    with pytest.raises(InputError, match="the preprocessing of Flatten is not known"):
        load_model(module)
    preprocess = Preprocess.resize_and_crop((8, 8))
    assert load_model(module, preprocess=preprocess).size == (8, 8)


def test_list_models():
    infos = list_models("deit_tiny")
    names = [info.name for info in infos]
    assert "deit_tiny_patch16_224" in names and all("deit_tiny" in name for name in names)
    assert {info.library for info in infos} == {"timm"} and "name" in repr(infos)
    everything = {info.name for info in list_models()}
    assert {"embedded", "torchvision:vit_b_16", "fan_tiny_12_p16_224"} < everything
    assert list_models("vit_b_1?") == []
    assert [info.name for info in list_models("*vit_b_1?")] == ["torchvision:vit_b_16"]
