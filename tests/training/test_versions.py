"""Pillow under timm's augmentation, and the files of a run."""

import json

import pytest
import torch
from PIL import Image

import steadygaze as sg
from helpers.training import recipe
from steadygaze.training.images import rand_augment


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


def test_a_run_of_other_settings_is_refused(data, tmp_path):
    sg.train(recipe(data), tmp_path, stop_after=3)
    with pytest.raises(sg.InputError, match=r"another recipe: ema.decay was 0.0, is now 0.5"):
        sg.train(recipe(data, ema={"decay": 0.5}), tmp_path)
    path = tmp_path / "train.json"
    written = json.loads(path.read_text())
    written["settings"]["gone"] = 1
    path.write_text(json.dumps(written))
    with pytest.raises(sg.InputError, match=r"another recipe: .*gone was 1"):
        sg.train(recipe(data), tmp_path)


def test_others_can_read_the_weights(data, tmp_path):
    sg.train(recipe(data, epochs=1), tmp_path)
    modes = {
        name: (tmp_path / name).stat().st_mode for name in ("train.json", "state.pt", "model.safetensors")
    }
    assert len(set(modes.values())) == 1, modes
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3
