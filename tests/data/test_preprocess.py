"""One preprocessing for every model: equal to that of timm, torchvision and transformers."""

import pickle

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError

TIMM = {
    "input_size": (3, 48, 48),
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.9,
    "crop_mode": "center",
}
CONFIGS = [
    TIMM,
    TIMM | {"crop_mode": "squash", "crop_pct": 1.0},
    TIMM | {"crop_mode": "border", "interpolation": "bilinear"},
    TIMM | {"input_size": (3, 32, 56), "crop_pct": 0.875},
]


@pytest.fixture
def image() -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((160, 120), Image.Resampling.BICUBIC)


@pytest.fixture
def mask() -> Image.Image:
    coarse = np.random.default_rng(1).choice(np.array([0, 128, 255], np.uint8), (12, 16))
    return Image.fromarray(coarse).resize((160, 120), Image.Resampling.NEAREST)


@pytest.mark.parametrize("config", CONFIGS)
def test_timm_configurations_give_timms_tensor(config, image):
    preprocess = Preprocess.from_timm(config)
    assert torch.equal(preprocess(image), create_transform(**config, is_training=False)(image))
    assert preprocess.size == config["input_size"][1:]


@pytest.mark.parametrize("name", ["test_vit", "deit_tiny_patch16_224", "xcit_nano_12_p16_224"])
def test_models_of_timm(name, image):
    model = timm.create_model(name)
    expected = create_transform(**resolve_data_config(model.pretrained_cfg, model=model), is_training=False)
    assert torch.equal(Preprocess.from_timm_model(model)(image), expected(image))


@pytest.mark.parametrize("weights", ["ViT_B_16_Weights", "ViT_H_14_Weights", "ResNet50_Weights"])
def test_presets_of_torchvision(weights, image):
    preset = getattr(torchvision.models, weights).DEFAULT.transforms()
    preprocess = Preprocess.from_torchvision(preset)
    assert torch.equal(preprocess(image), preset(image))
    side = preset.crop_size[0]
    assert preprocess.size == (side, side) and preprocess.crop_pct == side / preset.resize_size[0]


def test_segmentation_presets_of_torchvision_give_squares(image):
    preset = torchvision.models.segmentation.FCN_ResNet50_Weights.DEFAULT.transforms()
    assert Preprocess.from_torchvision(preset)(image).shape == (3, 520, 520)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ViTImageProcessor", {"size": {"height": 48, "width": 48}, "resample": 2}),
        (
            "BitImageProcessor",
            {"size": {"shortest_edge": 64}, "crop_size": {"height": 56, "width": 56}, "resample": 3},
        ),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 56}, "crop_pct": 0.875, "resample": 3}),
        ("ViTImageProcessor", {"size": {"height": 32, "width": 40}, "do_normalize": False, "resample": 3}),
    ],
)
def test_image_processors_of_transformers(kind, options, image):
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, kind)(**options)
    ours = Preprocess.from_transformers(processor)(image)
    theirs = torch.as_tensor(np.asarray(processor(image, return_tensors="pt")["pixel_values"][0]))
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().mean() < 0.01 and (ours - theirs).abs().max() < 0.1


@pytest.mark.parametrize("config", CONFIGS)
def test_pixels_are_the_tensor_before_normalisation(config, image):
    preprocess = Preprocess.from_timm(config)
    pixels = torch.from_numpy(preprocess.pixels(image).copy()).permute(2, 0, 1)
    assert pixels.dtype == torch.uint8 and torch.equal(preprocess.normalize(pixels), preprocess(image))
    assert torch.equal(preprocess.undo(preprocess(image)), pixels)
    assert np.array_equal(np.asarray(preprocess.to_image(preprocess(image))), pixels.permute(1, 2, 0))
    batch = torch.stack([preprocess(image)] * 2)[:, None]
    assert torch.equal(preprocess.undo(batch)[1, 0], pixels)


def test_pixels_before_the_crop(image):
    preprocess = Preprocess.from_timm(TIMM)
    uncropped = preprocess.pixels(image, crop=False)
    assert uncropped.shape == (53, 70, 3)
    cropped = CenterCrop((48, 48))(Image.fromarray(uncropped))
    assert np.array_equal(np.asarray(cropped), preprocess.pixels(image))


def test_masks_move_with_the_image(mask):
    """A mask is resized by nearest neighbor, so that an image of the same values moves in the same way."""
    for config in (TIMM, TIMM | {"crop_mode": "squash"}):
        nearest = Preprocess.from_timm(config | {"interpolation": "nearest"})
        pixels = nearest.pixels(mask.convert("RGB"))
        assert np.array_equal(Preprocess.from_timm(config).mask(mask).numpy(), pixels[..., 0])
    plain = Preprocess.resize_and_crop((32, 40), resize=60)
    expected = CenterCrop((32, 40))(Resize(60, InterpolationMode.NEAREST)(mask))
    assert np.array_equal(plain.mask(mask).numpy(), np.asarray(expected))


def test_masks_in_a_margin(mask):
    border = Preprocess.from_timm(CONFIGS[2] | {"crop_pct": 1.0})
    assert set(border.mask(mask)[0].tolist()) == {0} and set(border.mask(mask, padding=7)[0].tolist()) == {7}


def test_overridden_values_are_a_center_crop_of_timm(image):
    preset = torchvision.models.ViT_B_16_Weights.DEFAULT.transforms()
    own = Preprocess.from_torchvision(preset)
    assert torch.equal(own.override()(image), preset(image))
    smaller = own.override(size=(64, 64), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=1.0)
    assert smaller(image).shape == (3, 64, 64) and smaller.interpolation == "bilinear"
    assert smaller.mean == (0.5, 0.5, 0.5) and own.mean == (0.485, 0.456, 0.406)


def test_records_hold_texts_in_alphabetical_order():
    assert list(Preprocess.from_timm(TIMM).describe().items()) == [
        ("crop_mode", "center"),
        ("crop_pct", "0.9"),
        ("input_size", "(3, 48, 48)"),
        ("interpolation", "bicubic"),
        ("mean", "(0.485, 0.456, 0.406)"),
        ("std", "(0.229, 0.224, 0.225)"),
    ]


def test_it_can_be_sent_to_a_worker_process(image):
    preprocess = Preprocess.from_timm(TIMM)
    expected = preprocess(image)
    assert torch.equal(pickle.loads(pickle.dumps(preprocess))(image), expected)


def test_tensors_of_another_layout_are_refused(image):
    preprocess = Preprocess.from_timm(TIMM)
    with pytest.raises(
        InputError, match=r"expected images \(\.\.\., 3, H, W\), got a tensor of shape \(48, 48, 3\)"
    ):
        preprocess.normalize(torch.from_numpy(preprocess.pixels(image).copy()))
