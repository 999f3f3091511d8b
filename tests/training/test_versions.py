"""Training across versions: of Pillow under timm's augmentation, and of steadygaze itself under a run that
goes on."""

import json

import pytest
import torch
from PIL import Image

import steadygaze as sg
from helpers.training import recipe, same, weights
from steadygaze.training.images import rand_augment
from steadygaze.training.recipe import read_recipe


def test_rand_augment_trains_at_full_strength(data, tmp_path):
    augment = {
        "crop": "pad",
        "rand_augment": "rand-m10-n4-inc1",
    }  # keeps no bit of a color, which today's Pillow refuses
    assert sg.train(recipe(data, augment=augment, epochs=4), tmp_path).log


def test_a_color_without_bits_is_black():
    (op,) = [
        op
        for op in rand_augment("rand-m10-inc1", (0.5, 0.5, 0.5), 32).ops
        if op.name == "PosterizeIncreasing"
    ]
    image = Image.new("RGB", (2, 2), (255, 130, 70))
    assert op.aug_fn(image, 0).getpixel((1, 1)) == (0, 0, 0)
    assert op.aug_fn(image, 1).getpixel((1, 1)) == (128, 128, 0)


def test_a_run_of_an_older_version_goes_on(data, tmp_path):
    sg.train(recipe(data), tmp_path / "unbroken")
    sg.train(recipe(data), tmp_path / "old", stop_after=3)
    path = tmp_path / "old" / "train.json"
    written = json.loads(path.read_text())
    del written["settings"]["data"]["crop"], written["settings"]["ema"]  # keys that came later
    path.write_text(json.dumps(written))
    with pytest.raises(sg.InputError, match=r"another recipe: ema.decay was 0.0, is now 0.5"):
        sg.train(recipe(data, ema={"decay": 0.5}), tmp_path / "old")
    sg.train(recipe(data), tmp_path / "old")
    assert same(weights(tmp_path / "old"), weights(tmp_path / "unbroken"))
    written["settings"]["gone"] = 1
    path.write_text(json.dumps(written))
    with pytest.raises(sg.InputError, match=r"another recipe: .*gone was 1"):
        sg.train(recipe(data), tmp_path / "old")


def test_keys_of_the_first_version_are_read(tmp_path):
    (tmp_path / "old.toml").write_text("[model]\nname = 'x'\n[data]\npictures = [0, 3]\n")
    assert read_recipe(tmp_path / "old.toml").data.images == [0, 3]
    changes = {"data.pictures": [1, 2], "data.test_pictures": [4, 5]}
    data = read_recipe("relevance-deit-tiny-small", changes).data
    assert (data.images, data.test_images) == ([1, 2], [4, 5])


def test_others_can_read_the_weights(data, tmp_path):
    sg.train(recipe(data, epochs=1), tmp_path)
    modes = {
        name: (tmp_path / name).stat().st_mode for name in ("train.json", "state.pt", "model.safetensors")
    }
    assert len(set(modes.values())) == 1, modes
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3
