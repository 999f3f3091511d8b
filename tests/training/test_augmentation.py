"""timm's augmentation under today's Pillow, and what others can read of a training run."""

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


def test_others_can_read_the_weights(data, tmp_path):
    sg.train(recipe(data, epochs=1), tmp_path)
    modes = {
        name: (tmp_path / name).stat().st_mode for name in ("train.json", "state.pt", "model.safetensors")
    }
    assert len(set(modes.values())) == 1, modes
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3
