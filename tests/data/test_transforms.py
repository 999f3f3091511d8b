"""Preprocessing that the user gives: a Compose of torchvision, a transform of timm, any callable."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import (
    CenterCrop,
    Compose,
    InterpolationMode,
    Lambda,
    Normalize,
    Resize,
    ToTensor,
    v2,
)

import steadygaze as sg
from steadygaze.errors import InputError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
STEPS = [
    Resize(40, InterpolationMode.BICUBIC),
    CenterCrop(32),
    ToTensor(),
    Normalize(MEAN, STD),
]
V2 = [
    v2.ToImage(),
    v2.Resize(40),
    v2.CenterCrop(32),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize(MEAN, STD),
]


@pytest.fixture(scope="module")
def photo():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def module():
    return sg.load_model("embedded").model


@pytest.mark.parametrize("steps", [STEPS, V2], ids=["v1", "v2"])
def test_a_compose_is_called_as_it_is_and_read(module, photo, steps):
    transform = (v2.Compose if steps is V2 else Compose)(steps)
    loaded = sg.load_model(module, preprocess=transform)
    assert torch.equal(loaded.preprocess(photo), transform(photo))
    assert loaded.size == (32, 32) and loaded.mean == MEAN and loaded.std == STD
    pixels = torch.from_numpy(loaded.preprocess.pixels(photo)).permute(2, 0, 1)
    assert torch.allclose(loaded.preprocess.normalize(pixels), transform(photo), atol=1 / 255 / min(STD))
    assert loaded.preprocess.pixels(photo, crop=False).shape == (40, 56, 3)
    assert loaded.preprocess.mask(photo.convert("L")).shape == (32, 32)
    assert "0x" not in str(loaded.preprocess.describe()) and "32 x 32" in repr(loaded)
    assert sg.explain(loaded, loaded.preprocess(photo)[None], method="gae").scores.shape[0] == 1


def test_a_transform_of_timm_and_a_preset_of_torchvision(module, photo):
    from timm.data import create_transform
    from torchvision.transforms._presets import ImageClassification

    for transform in (create_transform((3, 32, 32), mean=MEAN, std=STD), ImageClassification(crop_size=32)):
        loaded = sg.load_model(module, preprocess=transform)
        assert loaded.size == (32, 32) and len(loaded.mean) == 3
        assert torch.equal(loaded.preprocess(photo), transform(photo))


def test_what_a_function_does_not_tell_is_asked_for(module, photo):
    transform = Compose(STEPS)

    def own(image):
        return transform(image)

    loaded = sg.load_model(module, preprocess=own)
    assert loaded.mean == () and "32 x 32" in repr(loaded)
    sg.explain(loaded, loaded.preprocess(photo)[None], method="gae")
    with pytest.raises(InputError, match=r"verify, stress and displayed images need .* mean= and std="):
        loaded.preprocess.pixels(photo)
    stated = sg.load_model(module, preprocess=own, mean=MEAN, std=STD)
    assert stated.preprocess.pixels(photo).shape == (32, 32, 3) and stated.mean == MEAN
    with pytest.raises(InputError, match=r"masks .* need the resize and crop"):
        stated.preprocess.mask(photo.convert("L"))


def test_what_does_not_fit_is_named(module):
    compose = Compose(STEPS)
    with pytest.raises(InputError, match=r"images of \(32, 32\), got image_size \(64, 64\)"):
        sg.load_model(module, preprocess=compose, image_size=64)
    with pytest.raises(InputError, match="normalizes with mean"):
        sg.load_model(module, preprocess=compose, mean=(0, 0, 0))
    with pytest.raises(InputError, match="tensors of different sizes"):
        sg.load_model(module, preprocess=Compose(STEPS[2:]))
    assert sg.load_model(module, preprocess=Compose(STEPS[2:]), image_size=32).size == (32, 32)
    with pytest.raises(InputError, match=r"expected a floating-point tensor \(3, H, W\).*got Image"):
        sg.load_model(module, preprocess=Compose(STEPS[:2]))
    with pytest.raises(InputError, match="preprocess fails on an RGB image"):
        sg.load_model(module, preprocess=Lambda(lambda image: image.missing))
    with pytest.raises(InputError, match="expected a callable"):
        sg.load_model(module, preprocess=224)


def test_preprocess_is_public(module):
    own = sg.Preprocess.resize_and_crop((32, 32), resize=36)
    assert sg.load_model(module, preprocess=own).preprocess is own
    with pytest.raises(InputError, match=r"sg\.Preprocess\."):
        sg.load_model(torch.nn.Flatten())


def test_a_run_uses_it(module, tmp_path, photo):
    (tmp_path / "photos" / "0").mkdir(parents=True)
    photo.save(tmp_path / "photos" / "0" / "a.png")
    loaded = sg.load_model(module, preprocess=Compose(STEPS))
    rows = sg.verify(loaded, tmp_path / "photos", methods=["gae"], metrics=["saco"], out=tmp_path / "run")
    assert len(rows) and not rows.unreadable
