"""Linear probe: `train = "head"` trains the last layer on features that are computed once."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import steadygaze as sg
from helpers.training import MODEL, content, image_folder, recipe, same, weights
from steadygaze.data.images import read_image
from steadygaze.runs.estimate import estimate_train
from steadygaze.training import images as features
from steadygaze.training.recipe import make_recipe


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sg.train(recipe(data, epochs=1), tmp_path_factory.mktemp("plain")).folder


def probe_recipe(data: Path, plain: Path, **more: Any):
    given = {"model": {"name": str(plain)}, "train": "head", "augment": {"crop": "none", "flip": 0.0}, **more}
    return make_recipe(content(data, **given))


def test_only_the_head_learns_and_starts_as_the_models_own(data, plain, tmp_path, monkeypatch):
    runs: list[int] = []
    cached = features.cache_features
    monkeypatch.setattr(
        "steadygaze.training.loop.cache_features",
        lambda *a, **k: (runs.append(1), cached(*a, **k))[1],
    )
    before = weights(plain)
    asked = probe_recipe(data, plain, epochs=3)
    got = sg.train(asked, tmp_path / "a")
    after = weights(got.folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    assert len(runs) == 2, "the features of training and test images, once for all epochs"
    assert all(p.requires_grad for p in got.model.parameters())
    tiny = {"optimizer": {"lr": 1e-30}, "schedule": {"name": "none"}, "epochs": 1}
    still = sg.train(probe_recipe(data, plain, **tiny), tmp_path / "still")
    assert same(weights(still.folder), before), "the head starts as the model's own"

    loaded = sg.load_model(str(got.folder))
    images, labels = [], []
    for label, name in enumerate(("bright", "dark")):
        for file in sorted((data / name).iterdir()):
            images.append(loaded.preprocess(read_image(file)))
            labels.append(label)
    with torch.no_grad():
        logits = loaded.model(torch.stack(images))
    accuracy = float((logits.argmax(1) == torch.tensor(labels)).float().mean())
    assert got.top1 == pytest.approx(accuracy), "tested on features as on images"
    loss = float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels)))
    assert float(got.log[-1]["test_loss"]) == pytest.approx(loss, rel=1e-4)


def test_a_probe_resumes_bit_for_bit(data, plain, tmp_path):
    asked = probe_recipe(data, plain, ema={"decay": 0.5})
    sg.train(asked, tmp_path / "a")
    for stop in (3, None):
        sg.train(asked, tmp_path / "b", stop_after=stop)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_step_is_that_of_fine_tuning_with_a_frozen_backbone(data, plain, tmp_path):
    """The same weights as SGD on the head of the whole model, image by image."""
    rules = {"name": "momentum", "momentum": 0.0, "lr": 0.5, "weight_decay": 0.0}
    asked = probe_recipe(
        data, plain, batch=12, epochs=1, optimizer=rules, schedule={"name": "none"}, test_every=0
    )
    got = weights(sg.train(asked, tmp_path).folder)
    loaded = sg.load_model(str(plain))
    files = sorted(file for name in ("bright", "dark") for file in (data / name).iterdir())
    images = torch.stack([loaded.preprocess(read_image(file)) for file in files])
    labels = torch.tensor([int(file.parent.name == "dark") for file in files])
    head = loaded.model.head
    torch.nn.functional.cross_entropy(loaded.model(images), labels).backward()
    expected = head.weight.detach() - 0.5 * head.weight.grad
    torch.testing.assert_close(got["head.weight"], expected)


def test_augmentation_is_not_used_and_the_log_says_so(data, plain, tmp_path, caplog):
    asked = make_recipe(
        content(
            data, model={"name": str(plain)}, train="head", epochs=1, augment={"crop": "pad", "mixup": 0.8}
        )
    )
    with caplog.at_level(logging.WARNING, "steadygaze"):
        sg.train(asked, tmp_path / "a")
    assert "center view" in caplog.text and "augment.crop, augment.mixup have no effect" in caplog.text
    sg.train(probe_recipe(data, plain, epochs=1), tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_unreadable_images_are_replaced_in_training_and_not_tested(plain, tmp_path):
    data = image_folder(tmp_path / "images")
    (data / "dark" / "2.png").write_bytes(b"no image")
    got = sg.train(probe_recipe(data, plain, epochs=1), tmp_path / "run")
    assert [Path(file).name for file in got.unreadable] == ["2.png"]
    assert got.top1 is not None and round(got.top1 * 11, 6) == round(got.top1 * 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": {"adl": {}}}, r"losses.adl: it needs the whole model.*Use cross_entropy"),
        ({"modules": {"tap": {}}}, r"modules.tap: train = 'head' does not train it"),
        ({"task": "segmentation"}, r"train: 'head' is for classification"),
        ({"train": "neck"}, r"train.*neck"),
    ],
)
def test_what_a_probe_cannot_do_is_an_error(changes, message, data):
    with pytest.raises(sg.SteadygazeError, match=message):
        make_recipe(content(data, **{"train": "head", **changes}))


def test_a_model_without_one_linear_head_is_an_error(data, tmp_path):
    model = {"name": "deit_tiny_distilled_patch16_224", "arguments": MODEL}
    with pytest.raises(sg.InputError, match="'head' needs a model whose last layer is linear"):
        sg.train(make_recipe(content(data, model=model, train="head")), tmp_path)


def test_the_cost_of_a_probe_is_one_pass_over_its_images(data, plain, tmp_path):
    found = estimate_train(probe_recipe(data, plain, epochs=50), tmp_path / "run")
    more = estimate_train(probe_recipe(data, plain, epochs=5000), tmp_path / "run")
    assert 0 < more.seconds < 10 * found.seconds, "12 images to train and 12 to test, once"
    assert not (tmp_path / "run").exists()
