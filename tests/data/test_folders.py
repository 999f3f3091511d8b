"""Labeled folders, masks in every layout, and what bad ones get."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import steadygaze as sg
from steadygaze.data.folders import ClassLookup, Item, interleave, read_class_folders, read_index
from steadygaze.data.masks import find_labeled_images, read_mask
from steadygaze.data.preprocess import Preprocess
from steadygaze.loading.load import load_model

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TEN = ClassLookup(CIFAR, 10)
THOUSAND = ClassLookup(None, 1000)


def save_image(path: Path, size=(12, 10), value=100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)
    return path


def mask(path: Path, pixels) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path)
    return path


def test_class_folders_behind_links(tmp_path):
    save_image(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "top").symlink_to(tmp_path)
    (tmp_path / "far").mkdir()
    (tmp_path / "elsewhere" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "elsewhere")
    assert [item.name for item in read_class_folders(tmp_path / "data", TEN)] == ["cat/a.png"]


def test_synset_index_and_name(tmp_path):
    for name in ("n01440764", "281", "n02123045"):
        save_image(tmp_path / name / "a.png")
    assert {item.name: item.label for item in read_class_folders(tmp_path, THOUSAND)} == {
        "n01440764/a.png": 0,
        "281/a.png": 281,
        "n02123045/a.png": 281,
    }
    assert [TEN.index(name) for name in ("airplane", "Cat", "9")] == [0, 3, 9]
    named = ClassLookup(("tabby, tabby cat", "crane", "crane, machine", "great white shark"), 4)
    assert [named.index(name) for name in ("tabby_cat", "crane", "Great white shark")] == [0, 1, 3]
    with pytest.raises(sg.InputError, match=r"\[0, 1\]"):
        ClassLookup(("crane", "crane"), 2).index("crane")


@pytest.mark.parametrize(
    ("name", "classes", "says"),
    [
        ("elephant", TEN, "unknown class 'elephant'"),
        ("ship ", TEN, ""),
        ("horze", TEN, "Did you mean 'horse'"),
        ("10", TEN, "0..9"),
        ("n02123045", TEN, "10 classes"),
        ("n99999999", THOUSAND, "n99999999"),
        ("tabby", THOUSAND, "no names"),
    ],
)
def test_class_names_nobody_knows(name, classes, says):
    if not says:
        assert classes.index(name) == 8
        return
    with pytest.raises((sg.UnknownNameError, sg.InputError), match=says):
        classes.index(name)


def test_folders_without_images(tmp_path):
    with pytest.raises(sg.InputError, match="found none"):
        find_labeled_images(tmp_path, None, TEN)
    with pytest.raises(sg.InputError, match="no such folder"):
        find_labeled_images(tmp_path / "nowhere", None, TEN)
    save_image(tmp_path / "a.png")
    with pytest.raises(sg.InputError, match="no class folder"):
        find_labeled_images(tmp_path, None, TEN)


def test_the_first_are_an_even_sample():
    groups = [[Item(f"{g}/{n}", Path(), g) for n in range(3)] for g in range(10)]
    order = interleave(groups)
    assert len({item.name for item in order}) == 30
    assert sorted(item.label for item in order[:10]) == list(range(10))
    assert max(np.diff(sorted(item.label for item in order[:5]))) <= 4, (
        "spread over all classes, not the first ones"
    )
    uneven = interleave([groups[0], groups[1][:1]])
    assert [item.name for item in uneven] == ["0/0", "1/0", "0/1", "0/2"]


def test_index_csv(tmp_path):
    save_image(tmp_path / "images" / "a.jpg")
    mask(tmp_path / "masks" / "a.png", np.full((10, 12), 255))
    (tmp_path / "index.csv").write_text(
        "image,mask,synset,imagenet_index,breed\nimages/a.jpg,masks/a.png,n02123394,283,Persian\n"
    )
    for data, masks in ((tmp_path, None), (tmp_path, tmp_path), (tmp_path / "images", tmp_path)):
        found = find_labeled_images(data, masks, THOUSAND)
        assert [(i.name, i.label, i.mask) for i in found.items] == [
            ("images/a.jpg", 283, tmp_path / "masks" / "a.png")
        ]
    (tmp_path / "index.csv").write_text("file,label\na,1\n")
    with pytest.raises(sg.InputError, match="columns"):
        read_index(tmp_path / "index.csv", THOUSAND)
    (tmp_path / "index.csv").write_text("image,label\n")
    with pytest.raises(sg.InputError, match="no images"):
        read_index(tmp_path / "index.csv", THOUSAND)


def test_pairs(tmp_path):
    for name in ("a", "b"):
        save_image(tmp_path / "images" / "cat" / f"{name}.jpg")
    with pytest.raises(sg.InputError, match="no such folder"):
        find_labeled_images(tmp_path / "images", tmp_path / "masks", TEN)
    (tmp_path / "masks").mkdir()
    with pytest.raises(sg.InputError, match="no image has a mask"):
        find_labeled_images(tmp_path / "images", tmp_path / "masks", TEN)
    pixels = np.zeros((10, 12))
    pixels[:5], pixels[5] = 255, 128
    mask(tmp_path / "masks" / "cat" / "a.png", pixels)
    found = find_labeled_images(tmp_path / "images", tmp_path / "masks", TEN)
    assert [i.name for i in found.items] == ["cat/a.jpg"] and found.without == 1
    assert np.array_equal(np.asarray(read_mask(found.items[0], found.decode, (12, 10))), pixels)
    other = np.zeros((10, 12))
    other[4:6, :3], other[7] = 255, 128
    for name, part in (("head", pixels), ("tail", other)):
        mask(tmp_path / "masks" / "cat" / "b" / f"{name}.png", part)
    parts = find_labeled_images(tmp_path / "images", tmp_path / "masks", TEN).items[1]
    union = read_mask(parts, found.decode, (12, 10))
    assert np.array_equal(np.asarray(union), np.maximum(pixels, other))


@pytest.mark.parametrize(
    ("pixels", "size", "says"),
    [
        (np.zeros((9, 12)), (12, 10), "12x9.*12x10"),
        (np.full((10, 12), 77), (12, 10), r"\[77\]"),
        (None, (12, 10), "decode"),
    ],
)
def test_bad_masks(tmp_path, pixels, size, says):
    save_image(tmp_path / "p" / "cat" / "a.png", size)
    if pixels is None:
        save_image(tmp_path / "m" / "cat" / "a.png").write_bytes(b"no mask")
    else:
        mask(tmp_path / "m" / "cat" / "a.png", pixels)
    found = find_labeled_images(tmp_path / "p", tmp_path / "m", TEN)
    with pytest.raises(sg.ImageError, match=says):
        read_mask(found.items[0], found.decode, size)


def test_masks_of_zero_and_one(tmp_path):
    save_image(tmp_path / "p" / "cat" / "a.png", (4, 2))
    mask(tmp_path / "m" / "cat" / "a.png", [[0, 1, 1, 0], [0, 0, 0, 1]])
    found = find_labeled_images(tmp_path / "p", tmp_path / "m", TEN)
    got = np.asarray(read_mask(found.items[0], found.decode, (4, 2)))
    assert got.tolist() == [[0, 255, 255, 0], [0, 0, 0, 255]]


@pytest.mark.parametrize("split", [False, True])
def test_imagenet_s(tmp_path, split):
    """ClassLookup are written as R + 256 G; 1000 is to be ignored."""
    save_image(tmp_path / "validation" / "n02123394" / "a.JPEG", (4, 2))
    rgb = np.zeros((2, 4, 3))
    rgb[0, :2] = [7, 1, 0]  # 263, the most frequent
    rgb[0, 2] = [1000 % 256, 1000 // 256, 0]
    rgb[1, 0] = [9, 0, 0]
    mask(tmp_path / "validation-segmentation" / "n02123394" / "a.png", rgb)
    data, masks = (
        (tmp_path / "validation", tmp_path / "validation-segmentation") if split else (tmp_path, None)
    )
    found = find_labeled_images(data, masks, THOUSAND)
    assert found.layout == "ImageNet-S" and found.items[0].label == 283
    got = np.asarray(read_mask(found.items[0], found.decode, (4, 2)))
    assert got.tolist() == [[255, 255, 128, 0], [0, 0, 0, 0]]


def test_pascal_voc(tmp_path):
    """Class indices 1..20, 255 is the border; labeled where the model knows the class."""
    save_image(tmp_path / "JPEGImages" / "x.jpg", (4, 2))
    (tmp_path / "ImageSets" / "Segmentation").mkdir(parents=True)
    (tmp_path / "ImageSets" / "Segmentation" / "val.txt").write_text("x\n")
    (tmp_path / "SegmentationClass").mkdir()
    image = Image.fromarray(np.array([[8, 8, 255, 0], [12, 0, 0, 0]], dtype=np.uint8), "L").convert("P")
    image.putpalette([v for i in range(256) for v in (i, 255 - i, 0)])
    image.putdata([8, 8, 255, 0, 12, 0, 0, 0])
    image.save(tmp_path / "SegmentationClass" / "x.png")
    for classes, label, expected in (
        (TEN, 3, [[255, 255, 128, 0], [0, 0, 0, 0]]),  # cat
        (ClassLookup(None, 20), 7, [[255, 255, 128, 0], [0, 0, 0, 0]]),
        (THOUSAND, None, [[255, 255, 128, 0], [255, 0, 0, 0]]),  # every object
    ):
        found = find_labeled_images(tmp_path, None, classes)
        assert found.items[0].label == label and found.layout == "Pascal VOC"
        assert np.asarray(read_mask(found.items[0], found.decode, (4, 2))).tolist() == expected


def test_masks_take_the_way_of_their_images():
    """Resize and crop of a mask put its edges where the preprocessing puts those of the image."""
    import timm
    from timm.data import resolve_data_config

    pixels = np.zeros((300, 420), dtype=np.uint8)
    pixels[60:200, 150:260] = 255
    timm_config = resolve_data_config({}, model=timm.create_model("deit_tiny_patch16_224"))
    for preprocess in (
        load_model("embedded").preprocess,
        Preprocess.from_timm(timm_config),
        Preprocess.from_timm(timm_config | {"input_size": (3, 160, 240)}),
    ):
        std, mean = preprocess.std[0], preprocess.mean[0]
        seen = preprocess(Image.fromarray(pixels).convert("RGB"))[0].numpy() * std + mean
        moved = preprocess.mask(Image.fromarray(pixels)).numpy()
        assert moved.shape == seen.shape and set(np.unique(moved)) == {0, 255}
        assert ((moved > 0) != (seen > 0.5)).mean() < 0.02
