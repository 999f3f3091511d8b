"""Every reader on a small tree in the published layout and on a broken one; the protocols by loops."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo, RealLabelsImagenet

from steadygaze.data.datasets.imagenet import COMMON, imagenet_synsets
from steadygaze.data.datasets.shifts import READERS, Shift, read_shift
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.shift import any_correct, shift_scores

INFO = ImageNetInfo()
SYNSETS = INFO.label_names()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("one") / "a.png"
    Image.new("RGB", (9, 8), (200, 10, 10)).save(file)
    return file.read_bytes()


def plant(root: Path, names: Iterable[str], data: bytes) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return root


def labels_of(shift: Shift) -> dict[str, tuple[int, ...]]:
    return {item.name: item.right for item in shift.items}


# -- protocols -------------------------------------------------------------------------------------


def test_top_k_is_the_loop_with_and_without_restriction() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 30, generator=generator).round(decimals=1)  # with ties
    right = [tuple(torch.randperm(30, generator=generator)[: 1 + i % 3].tolist()) for i in range(40)]
    some = (2, 3, 5, 8, 13, 21, 29)
    for classes in (None, some):
        for k in (1, 5):
            got = any_correct(logits, right, k=k, classes=classes)
            for i in range(40):
                ranked = sorted(classes or range(30), key=lambda c: (-float(logits[i, c]), c))
                assert bool(got[i]) == bool(set(ranked[:k]) & set(right[i]))


def test_scores_are_named_by_their_protocol(tmp_path: Path, image: bytes) -> None:
    names = [f"{s}/{i}.jpg" for i, s in enumerate(imagenet_synsets("a")[:4])]
    shift = read_shift("imagenet-a", plant(tmp_path, names, image), partial=True)
    assert shift.classes is not None and len(shift.classes) == 200
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    outside = next(c for c in range(1000) if c not in shift.classes)
    for row, item in enumerate(shift.items):
        logits[row, item.right[0]] = 50
        logits[row, outside] = 99  # a class that ImageNet-A does not have
    scores = shift_scores(logits, shift.items, shift)
    assert list(scores) == ["top1 of 1000", "top5 of 1000", "top1 of 200", "top5 of 200"]
    assert not scores["top1 of 1000"].any() and scores["top5 of 1000"].all() and scores["top1 of 200"].all()
    assert list(shift_scores(logits, shift.items, Shift("x", shift.items))) == [
        "top1 of 1000",
        "top5 of 1000",
    ]


def test_top_k_wants_logits_of_those_classes() -> None:
    with pytest.raises(InputError, match=r"0\.\.9"):
        any_correct(torch.zeros(1, 10), [(281,)], k=1)
    with pytest.raises(InputError, match="at least one"):
        any_correct(torch.zeros(1, 10), [()], k=1)
    with pytest.raises(InputError, match="k: expected"):
        any_correct(torch.zeros(1, 10), [(1,)], k=11)


# -- sets by synset --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "subset", "file"), [("imagenet-a", "a", "0.0001_x_0.9.jpg"), ("imagenet-r", "r", "art_0.jpg")]
)
def test_sets_of_200_synsets(tmp_path: Path, image: bytes, name: str, subset: str, file: str) -> None:
    synsets = imagenet_synsets(subset)
    plant(tmp_path, [f"{s}/{file}" for s in synsets], image)
    (tmp_path / "README.txt").write_text("read me")
    with pytest.raises(InputError, match=r"expected (7500|30000) images .* found 200"):
        read_shift(name, tmp_path)
    shift = read_shift(name, tmp_path, partial=True)
    assert labels_of(shift) == {f"{s}/{file}": (SYNSETS.index(s),) for s in synsets}
    assert shift.classes == tuple(sorted(SYNSETS.index(s) for s in synsets))
    assert any("200 of" in note and "images" in note for note in shift.notes)
    assert {item.group for item in shift.items} == ({"art"} if name == "imagenet-r" else {""})


def test_a_complete_tree_has_no_notes(tmp_path: Path, image: bytes) -> None:
    plant(tmp_path, [f"{i}/{n}.jpeg" for i in range(1000) for n in range(10)], image)
    shift = read_shift("imagenet-v2", tmp_path)
    assert shift.notes == () and len(shift.items) == 10_000
    assert all(item.right == (int(item.name.split("/")[0]),) for item in shift.items)
    assert (
        len({item.right for item in shift.items[:1000]}) == 1000
    )  # one of every class before the second of any


def test_sketch_in_the_folder_of_its_archive(tmp_path: Path, image: bytes) -> None:
    plant(tmp_path / "sketch", [f"{s}/sketch_0.JPEG" for s in SYNSETS[:3]], image)
    shift = read_shift("imagenet-sketch", tmp_path, partial=True)
    assert labels_of(shift) == {f"{s}/sketch_0.JPEG": (i,) for i, s in enumerate(SYNSETS[:3])}
    assert shift.classes is None and any("3 of 1000 class folders" in note for note in shift.notes)


@pytest.mark.parametrize("name", sorted(set(READERS) - {"imagenet-real"}))
def test_a_missing_folder_says_what_was_expected(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"expected .*does not exist"):
        read_shift(name, tmp_path / "nowhere")


def test_half_a_tree_names_what_is_missing(tmp_path: Path, image: bytes) -> None:
    plant(tmp_path, [f"{s}/a.jpg" for s in imagenet_synsets("a")[3:]], image)
    with pytest.raises(InputError, match="lacks 3 of 200 class folders: n01498041"):
        read_shift("imagenet-a", tmp_path)
    (tmp_path / imagenet_synsets("a")[0]).mkdir()
    with pytest.raises(InputError, match="lacks 2 of 200"):
        read_shift("imagenet-a", tmp_path)
    assert "n01498041 is empty" in read_shift("imagenet-a", tmp_path, partial=True).notes


def test_folders_that_do_not_map_are_named(tmp_path: Path, image: bytes) -> None:
    plant(tmp_path, ["n01498041/a.jpg", "n99999999/a.jpg"], image)
    with pytest.raises(InputError, match="match no class: n99999999"):
        read_shift("imagenet-a", tmp_path, partial=True)
    with pytest.raises(UnknownNameError, match="imagenet-sketch"):
        read_shift("imagenet-sketsh", tmp_path)


# -- ReaL ------------------------------------------------------------------------------------------


def test_real_labels_agree_with_timm(tmp_path: Path, image: bytes) -> None:
    labels = [[3, 5], [], [7], [9, 1, 2], [11]]
    names = [f"ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(5)]
    plant(tmp_path, [f"{SYNSETS[i]}/{name}" if i % 2 else name for i, name in enumerate(names)], image)
    (tmp_path / "real.json").write_text(json.dumps(labels))
    shift = read_shift("imagenet-real", tmp_path)
    assert [item.right for item in shift.items] == [(3, 5), (7,), (9, 1, 2), (11,)]
    assert shift.left_out == {"no label is right": (names[1],)} and shift.notes == ()
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = logits[3, 2] = 20
    judge = RealLabelsImagenet(names, real_json=str(tmp_path / "real.json"))
    judge.add_result(logits)
    ours = shift_scores(logits[[0, 2, 3, 4]], shift.items, shift)
    for k in (1, 5):
        assert 100 * ours[f"top{k} of 1000"].double().mean().item() == pytest.approx(judge.get_accuracy(k))


def test_real_labels_of_a_part(tmp_path: Path, image: bytes) -> None:
    plant(tmp_path / "val", ["ILSVRC2012_val_00000002.JPEG"], image)
    with pytest.raises(InputError, match=r"real\.json is missing"):
        read_shift("imagenet-real", tmp_path / "val")
    (tmp_path / "real.json").write_text("[[1], [2]")
    with pytest.raises(InputError, match="truncated"):
        read_shift("imagenet-real", tmp_path / "val", real=tmp_path / "real.json")
    (tmp_path / "real.json").write_text("[[1], [2]]")
    with pytest.raises(InputError, match="expected 2 images"):
        read_shift("imagenet-real", tmp_path / "val", real=tmp_path / "real.json")
    shift = read_shift("imagenet-real", tmp_path / "val", real=tmp_path / "real.json", partial=True)
    assert [item.right for item in shift.items] == [(2,)] and shift.notes == ("1 of 2 images",)
    (tmp_path / "real.json").write_text("[[1], [1000]]")
    with pytest.raises(InputError, match=r"expected 0\.\.999"):
        read_shift("imagenet-real", tmp_path / "val", real=tmp_path / "real.json", partial=True)


# -- ObjectNet -------------------------------------------------------------------------------------


def objectnet_tree(root: Path) -> Path:
    """Two classes that ImageNet has (one of them twice), one that it has not; labels in another order."""
    maps = root / "mappings"
    maps.mkdir(parents=True)
    order = np.random.default_rng(0).permutation(1000).tolist()  # line -> class
    (maps / "imagenet_to_label_2012_v2").write_text(
        "\n".join(INFO.index_to_description(c) + f" #{c}" for c in order) + "\n"
    )
    (maps / "pytorch_to_imagenet_2012_id.json").write_text(
        json.dumps({str(c): line for line, c in enumerate(order)})
    )
    label = {c: INFO.index_to_description(c) + f" #{c}" for c in (409, 530, 414)}
    both = {"Alarm clock": f"{label[409]}; {label[530]}", "Backpack": label[414]}
    (maps / "objectnet_to_imagenet_1k.json").write_text(json.dumps(both))
    folders = {"alarm_clock": "Alarm clock", "backpack": "Backpack", "air_freshener": "Air freshener"}
    (maps / "folder_to_objectnet_label.json").write_text(json.dumps(folders))
    for i, name in enumerate(folders):
        (root / "images" / name).mkdir(parents=True)
        inner = Image.new("RGB", (20, 12), (255, 0, 0))
        inner.paste((0, 0, 40 + i), (2, 2, 18, 10))
        inner.save(root / "images" / name / f"{i}.png")
    return root


def test_objectnet(tmp_path: Path) -> None:
    root = objectnet_tree(tmp_path / "objectnet-1.0")
    shift = read_shift("objectnet", tmp_path)
    assert labels_of(shift) == {"alarm_clock/0.png": (409, 530), "backpack/1.png": (414,)}
    assert shift.classes == (409, 414, 530) and shift.left_out == {"no class of ImageNet": ("air_freshener",)}
    clean = np.asarray(shift.read(shift.items[0]))
    assert clean.shape == (8, 16, 3) and not clean[..., 0].any()  # no red is left
    kept = read_shift("objectnet", root, border=False, labels="first")
    assert np.asarray(kept.read(kept.items[0]))[0, 0].tolist() == [255, 0, 0]
    assert labels_of(kept)["alarm_clock/0.png"] == (409,) and kept.classes == (409, 414, 530)


def test_objectnet_broken(tmp_path: Path) -> None:
    root = objectnet_tree(tmp_path)
    with pytest.raises(InputError, match="'any' or 'first'"):
        read_shift("objectnet", root, labels="all")
    (root / "images" / "backpack").rename(root / "backpack")
    with pytest.raises(InputError, match="lacks 1 of 3 folders: backpack"):
        read_shift("objectnet", root)
    assert list(labels_of(read_shift("objectnet", root, partial=True))) == ["alarm_clock/0.png"]
    mapping = root / "mappings" / "objectnet_to_imagenet_1k.json"
    mapping.write_text(json.dumps({"Backpack": "no such thing"}))
    with pytest.raises(InputError, match="do not map: no such thing"):
        read_shift("objectnet", root)
    mapping.unlink()
    with pytest.raises(InputError, match=r"objectnet_to_imagenet_1k.json is missing"):
        read_shift("objectnet", root)


# -- SI-Score, ImageNet-C --------------------------------------------------------------------------


def test_si_score(tmp_path: Path, image: bytes) -> None:
    wanted = {
        "koala": 105,
        "common fig": 952,
        "pitcher (container)": 725,
        "band-aid": 419,
        "kite": 21,
        "jeans": 608,
    }
    plant(tmp_path, [f"{name}/{i}.jpg" for i, name in enumerate(wanted)], image)
    shift = read_shift("si-score", tmp_path)
    assert labels_of(shift) == {f"{name}/{i}.jpg": (wanted[name],) for i, name in enumerate(wanted)}
    with (tmp_path / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_id", "x_coord", "y_coord", "area", "rotation", "foreground_class"])
        writer.writerows([i, 0.5, 0.5, 0.2, 20 * i + 1, 0] for i in range(7))
    with pytest.raises(InputError, match="expected 7 images"):
        read_shift("si-score", tmp_path)
    groups = {item.name: item.group for item in read_shift("si-score", tmp_path, partial=True).items}
    assert groups["common fig/1.jpg"] == "x=0.5 y=0.5 area=0.2 rotation=21"
    plant(tmp_path, ["gizmo/9.jpg"], image)
    with pytest.raises(InputError, match="do not map: gizmo"):
        read_shift("si-score", tmp_path, partial=True)
    (tmp_path / "foreground_classes.csv").write_text("int,label\n17,gizmo\n")
    assert labels_of(read_shift("si-score", tmp_path, partial=True))["gizmo/9.jpg"] == (17,)


def test_imagenet_c(tmp_path: Path, image: bytes) -> None:
    file = "ILSVRC2012_val_00000001.JPEG"
    wanted = {f"blur/defocus_blur/{s}/{SYNSETS[7]}/{file}": (7, f"defocus_blur:{s}") for s in range(1, 6)}
    wanted |= {f"fog/{s}/{SYNSETS[9]}/{file}": (9, f"fog:{s}") for s in range(1, 6)}
    plant(tmp_path, wanted, image)
    with pytest.raises(InputError, match="lacks 13 of 15 corruptions: gaussian_noise"):
        read_shift("imagenet-c", tmp_path)
    shift = read_shift("imagenet-c", tmp_path, partial=True)
    assert {i.name: (i.right[0], i.group) for i in shift.items} == wanted and shift.ready
    assert "2 of 15 corruptions" in shift.notes
    plant(tmp_path, [f"snow/3/{SYNSETS[0]}/{file}"], image)
    assert "snow: 1 of 5 severity folders" in read_shift("imagenet-c", tmp_path, partial=True).notes
    with pytest.raises(InputError, match="lacks 999 of 1000 class folders"):
        read_shift("imagenet-c", tmp_path, corruptions=("fog",))
    with pytest.raises(InputError, match="lacks 4 of 5"):
        read_shift("imagenet-c", tmp_path, corruptions=("snow",))
    with pytest.raises(UnknownNameError, match="fog"):
        read_shift("imagenet-c", tmp_path, corruptions=("fogg",))


def test_imagenet_c_tells_once_what_many_parts_lack_and_names_what_is_not_asked_for(
    tmp_path: Path, image: bytes
) -> None:
    names = [f"extra/saturate/{s}" for s in range(1, 6)] + [
        f"{kind}/{s}" for kind in COMMON for s in range(1, 6)
    ]
    plant(tmp_path, [f"{name}/{SYNSETS[7]}/ILSVRC2012_val_00000001.JPEG" for name in names], image)
    common = read_shift("imagenet-c", tmp_path, partial=True)
    assert {i.group.split(":")[0] for i in common.items} == set(COMMON)
    assert common.left_out == {"corruptions not requested": ("saturate",)}
    noise = ", ".join(f"gaussian_noise:{severity}" for severity in range(1, 6))
    begin = f"{noise}, shot_noise:1 and 69 more: "
    assert common.notes == (begin + "1 of 1000 class folders", begin + "1 of 50000 images")
    some = read_shift(
        "imagenet-c", tmp_path, corruptions=("fog", "saturate"), severities=(2, 5), partial=True
    )
    assert {i.group for i in some.items} == {"fog:2", "fog:5", "saturate:2", "saturate:5"}


def test_every_image_of_a_shift_can_be_read(tmp_path: Path) -> None:
    gray: dict[str, Any] = {"L": 90, "RGBA": (1, 2, 3, 90), "P": 3}
    for i, (mode, color) in enumerate(gray.items()):
        (tmp_path / str(i)).mkdir()
        Image.new(mode, (3, 2), color).save(tmp_path / str(i) / "a.png")
    shift = read_shift("imagenet-v2", tmp_path, partial=True)
    assert [shift.read(item).mode for item in shift.items] == ["RGB"] * 3
