"""Perturbation sequences: shapes, seeds, agreement with torchvision and OpenCV as used for ImageNet-P."""

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tv

from benchmarks.corruptions import sample_image
from steadygaze.data.datasets.imagenet import PERTURBATIONS
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.sequences import sequence

FRAMES = {"translate": 41}
SMALL_FRAMES = {"translate": 16, "motion_blur": 21}
IMAGE = sample_image(96, seed=3)[:80]  # (80, 96, 3)


def crop(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(tv.center_crop(image, [size, size]))


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_shape_seed_and_no_side_effect(name):
    before, state = IMAGE.copy(), np.random.get_state()[1].copy()  # noqa: NPY002
    frames = sequence(IMAGE, name, seed=1, size=72)
    assert frames.shape == (FRAMES.get(name, 31), 72, 72, 3)
    assert frames.dtype == np.uint8
    assert (before == IMAGE).all()
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert (frames == sequence(IMAGE, name, seed=1, size=72)).all()
    differs = (frames != sequence(IMAGE, name, seed=2, size=72)).any()
    assert differs == (name in ("gaussian_noise", "shot_noise", "snow"))
    small = sequence(sample_image(32), name, seed=1)
    assert small.shape == (SMALL_FRAMES.get(name, 31), 32, 32, 3)
    assert all((a != b).any() for a, b in pairwise(frames))  # every frame is another one


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("gaussian_noise", 0),
        ("shot_noise", 0),
        ("zoom_blur", 0),
        ("translate", 20),
        ("rotate", 15),
        ("brightness", 15),
    ],
)
def test_the_frame_that_is_the_image_itself(name, first):
    frame = sequence(IMAGE, name, seed=0, size=72)[first].astype(int)
    assert np.abs(frame - crop(Image.fromarray(IMAGE), 72)).max() <= 1


@pytest.mark.parametrize("frame", [0, 7, 22, 30])
def test_affine_kinds_agree_with_torchvision(frame):
    image = Image.fromarray(IMAGE)

    def wanted(angle: float = 0, shift: int = 0, scale: float = 1.0, smooth: bool = True) -> np.ndarray:
        way = InterpolationMode.BILINEAR if smooth else InterpolationMode.NEAREST
        return crop(tv.affine(image, angle, [shift, 0], scale, [0.0, 0.0], interpolation=way), 72).astype(int)

    def made(name: str) -> np.ndarray:
        return sequence(IMAGE, name, seed=0, size=72, settings="imagenet")[frame].astype(int)

    assert (made("translate") == wanted(shift=frame - 20, smooth=False)).all()
    assert np.abs(made("rotate") - wanted(angle=frame - 15)).max() <= 1
    assert np.abs(made("scale") - wanted(scale=(frame * 2.5 + 40) / 100)).max() <= 1
    total = sum(wanted(scale=1 + 0.004 * k) for k in range(frame + 1))
    assert np.abs(made("zoom_blur") - total / (frame + 1)).max() <= 1.01


@pytest.mark.parametrize("frame", [0, 10, 25, 30])
def test_tilt_agrees_with_opencv(frame):
    cv2 = pytest.importorskip("cv2")
    h, w = IMAGE.shape[:2]
    phi, f = np.deg2rad(frame - 15), np.hypot(w, h)
    c, s = np.cos(phi), np.sin(phi)
    onto = np.array([[1, 0, -w / 2], [0, 1, -h / 2], [0, 0, 1], [0, 0, 1]])
    rx = np.array([[1, 0, 0, 0], [0, c, -s, 0], [0, s, c, 0], [0, 0, 0, 1]])
    ry = np.array([[c, 0, -s, 0], [0, 1, 0, 0], [s, 0, c, 0], [0, 0, 0, 1]])
    back = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, f], [0, 0, 0, 1]])
    lens = np.array([[f, 0, w / 2, 0], [0, f, h / 2, 0], [0, 0, 1, 0]])
    wanted = crop(
        Image.fromarray(cv2.warpPerspective(IMAGE, lens @ back @ rx @ ry @ onto, (w, h))), 60
    ).astype(int)
    made = sequence(IMAGE, "tilt", seed=0, size=60, settings="imagenet")[frame].astype(int)
    off = np.abs(made - wanted)
    assert off.mean() < 0.7  # OpenCV rounds places to 1/32 pixel
    assert np.percentile(off, 99) <= 4


def test_noise_has_its_strength():
    gray = np.full((72, 72, 3), 128, dtype=np.uint8)
    for difficulty, scale in ((1, 0.03), (2, 0.05), (3, 0.08)):
        frames = sequence(gray, "gaussian_noise", seed=0, difficulty=difficulty, settings="imagenet")
        assert frames[1:].std() == pytest.approx(255 * scale, rel=0.02)
    for difficulty, photons in ((1, 300), (2, 120), (3, 60)):
        frames = sequence(gray, "shot_noise", seed=0, difficulty=difficulty, settings="imagenet")
        assert frames[1:].std() == pytest.approx(255 * np.sqrt(128 / 255 / photons), rel=0.02)


def test_brightness_rises():
    means = sequence(IMAGE, "brightness", seed=0, size=72).mean((1, 2, 3))
    assert (np.diff(means) > 0).all()


def test_bad_input():
    with pytest.raises(UnknownNameError, match="Did you mean 'rotate'"):
        sequence(IMAGE, "rotat", seed=0)
    with pytest.raises(InputError, match="difficulty of 1, 2 or 3"):
        sequence(IMAGE, "snow", seed=0, difficulty=4)
    with pytest.raises(InputError, match="shorter side"):
        sequence(IMAGE, "snow", seed=0, size=100)
    with pytest.raises(InputError, match=r"uint8 array \(H, W, 3\)"):
        sequence(IMAGE[None], "snow", seed=0)
    with pytest.raises(InputError, match="float"):
        sequence(IMAGE / 255, "snow", seed=0)
