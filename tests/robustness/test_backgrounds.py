"""Backgrounds: composed images against an oracle; models that look at the object or the background alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import steadygaze as sg
from oracles import backgrounds as oracle
from steadygaze.data.preprocess import Preprocess
from steadygaze.robustness import background_gap, mix, only_background, only_object
from steadygaze.robustness.backgrounds import background_share

SIDE, HALF = 16, (0.5, 0.5, 0.5)
CONFIG = {"input_size": (3, SIDE, SIDE), "mean": HALF, "std": HALF, "crop_pct": 1.0}
CONFIG |= {"interpolation": "bicubic", "crop_mode": "center"}
LEVELS = (40, 120, 200)  # gray level of the object and of the background of each class
KINDS = ("only_fg", "only_bg_t", "mixed_same", "mixed_other")


class ByLevel(torch.nn.Module):
    """Predicts the class with the gray level of one pixel: in the middle, or in a corner."""

    def __init__(self, at: int, classes: int = 3) -> None:
        super().__init__()
        self.at = at
        levels = torch.linspace(40, 200, classes) if classes != 3 else torch.tensor(LEVELS)
        self.levels = torch.nn.Parameter((levels / 255 - 0.5) / 0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return -10 * (images[:, 0, self.at, self.at, None] - self.levels) ** 2


def loaded(at: int, classes: int = 3) -> sg.LoadedModel:
    return sg.load_model(ByLevel(at, classes), preprocess=Preprocess.from_timm(CONFIG), num_classes=classes)


def random_pair(seed: int, box: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    image, mask = rng.integers(0, 256, (12, 10, 3), dtype=np.uint8), np.zeros((12, 10), np.uint8)
    top, bottom, left, right = box
    mask[top:bottom, left:right] = 255 * (rng.random((bottom - top, right - left)) < 0.8)
    mask[top, left] = mask[bottom - 1, right - 1] = 255
    return image, mask


def test_composed_images_agree_with_the_oracle() -> None:
    boxes = [(2, 8, 3, 7), (0, 12, 0, 6), (5, 12, 1, 10), (1, 11, 0, 10), (0, 3, 4, 9)]
    pairs = [random_pair(seed, box) for seed, box in enumerate(boxes)]
    for (image, mask), (other, other_mask) in zip(pairs, pairs[1:] + pairs[:1], strict=True):
        assert (only_background(image, mask) == oracle.tiled(image, mask)).all()
        assert (mix(image, mask, other, other_mask) == oracle.mixed(image, mask, other, other_mask)).all()
        assert (only_object(image, mask) == image * (mask == 255)[..., None]).all()
    same, other = np.random.default_rng(0).random((2, 50)) < 0.6
    assert background_gap(same, other) == pytest.approx(oracle.gap(same.tolist(), other.tolist()), abs=1e-12)


def test_an_object_that_fills_the_image() -> None:
    image, mask = np.full((4, 4, 3), 10, np.uint8), np.eye(4, dtype=np.uint8) * 255
    image[mask > 0] = 200
    assert (only_background(image, mask) == 10).all() and background_share(mask) == 0
    assert (only_background(image, np.full((4, 4), 255)) == 128).all()
    with pytest.raises(sg.InputError, match="no pixel is marked"):
        only_background(image, np.zeros((4, 4)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of four images, whose object and background both have the gray level of the class."""
    folder = tmp_path_factory.mktemp("backgrounds")
    lines = ["image,label,mask"]
    for number in range(12):
        label = number % 3
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[5:11, 4:12] = 255
        Image.fromarray(np.full((SIDE, SIDE, 3), LEVELS[label], np.uint8)).save(folder / f"{number}.png")
        Image.fromarray(mask).save(folder / f"{number}-mask.png")
        lines.append(f"{number}.png,{label},{number}-mask.png")
    (folder / "index.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("at", "accuracy", "gap", "follows"),
    [(8, (1, 1, 1, 1), 0, 0), (0, (1 / 3, 1, 1, 0), 1, 1)],  # black is nearest to the first class
    ids=["object", "background"],
)
def test_models_that_look_at_one_of_them(data: Path, at: int, accuracy, gap: int, follows: int) -> None:
    (card,) = sg.stress(loaded(at), data, suites="backgrounds", batch_size=5).cards()
    found = [card.numbers[kind, "top1"].value for kind in KINDS]
    assert found == pytest.approx(accuracy)
    assert card.numbers["backgrounds", "background_gap"].value == gap
    assert card.numbers["mixed_other", "follows_background"].value == follows
    assert any("backgrounds" in table.title for suite in card.suites for table in suite.tables(card))


def test_backgrounds_need_masks_and_classes(tmp_path: Path) -> None:
    for label in (0, 1):
        (tmp_path / str(label)).mkdir()
        Image.new("RGB", (SIDE, SIDE)).save(tmp_path / str(label) / "a.png")
    with pytest.raises(sg.InputError, match="backgrounds: expected masks"):
        sg.stress(loaded(0), tmp_path, suites="backgrounds")
    masks = tmp_path / "masks"
    for label in (0, 1):
        (masks / str(label)).mkdir(parents=True)
        Image.new("L", (SIDE, SIDE), 255).save(masks / str(label) / "a.png")
    images = tmp_path / "images"
    images.mkdir()
    for label in (0, 1):
        (tmp_path / str(label)).rename(images / str(label))
    with pytest.raises(sg.InputError, match="two classes with two images each"):
        sg.stress(loaded(0), images, suites="backgrounds", masks=masks)


@pytest.fixture(scope="module")
def challenge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each class once; in mixed_rand the background is of the class two further, of class 0 its own."""
    folder = tmp_path_factory.mktemp("in9")
    levels = np.linspace(40, 200, 9)
    names = ["dog", "bird", "vehicle", "reptile", "carnivore", "insect", "instrument", "primate", "fish"]
    for label, name in enumerate(names):
        behind = {"original": label, "mixed_same": label, "mixed_next": (label + 1) % 9}
        behind["mixed_rand"] = (label + 2) % 9 if label else 0
        for variant, background in behind.items():
            image = np.full((SIDE, SIDE, 3), levels[background], np.uint8)
            image[5:11, 4:12] = levels[label]
            place = folder / variant / "val" / f"{label:02d}_{name}"
            place.mkdir(parents=True)
            ids = [f"n0000000{c}_{c}" for c in (label, background)]
            stem = ids[0] if variant == "original" else f"fg_{ids[0]}_bg_{ids[1]}"
            Image.fromarray(image).save(place / f"{stem}.png")
    return folder


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (8, {"original": 1, "mixed_same": 1, "mixed_next": 1, "mixed_rand": 1}),
        (0, {"original": 1, "mixed_same": 1, "mixed_next": 0, "mixed_rand": 1 / 9}),
    ],
    ids=["object", "background"],
)
def test_the_backgrounds_challenge(challenge: Path, at: int, expected: dict[str, float]) -> None:
    (card,) = sg.stress(loaded(at, 9), None, suites=f"backgrounds_challenge:{challenge}").cards()
    assert {name: card.numbers[f"in9/{name}", "top1"].value for name in expected} == pytest.approx(expected)
    for variant, images in (("mixed_next", 9), ("mixed_rand", 8)):  # one is on a background of its own class
        number = card.numbers[f"in9/{variant}", "follows_background"]
        assert (number.value, number.images) == (float(at == 0), images)
    gap = card.numbers["in9", "background_gap"].value
    assert gap == pytest.approx(expected["mixed_same"] - expected["mixed_rand"])


def test_the_map_from_imagenet_to_the_nine_classes(challenge: Path, tmp_path: Path) -> None:
    suite = f"backgrounds_challenge:{challenge}"
    model = loaded(8, 1000)
    with pytest.raises(sg.InputError, match=r"needs in_to_in9\.json"):
        sg.stress(model, None, suites=suite)
    with pytest.raises(sg.InputError, match="has 3"):
        sg.stress(loaded(8), None, suites=suite)
    with pytest.raises(sg.InputError, match=r"expected the folders original, only_fg"):
        sg.stress(model, None, suites=f"backgrounds_challenge:{tmp_path}")
    table = {str(c): round(c * 8 / 999) if c != 0 else -1 for c in range(1000)}
    (tmp_path / "map.json").write_text(json.dumps(table))
    (card,) = sg.stress(model, None, suites=suite, in_to_in9=tmp_path / "map.json").cards()
    assert card.numbers["in9/original", "top1"].value == pytest.approx(
        8 / 9
    )  # class 0 maps to none of the nine
