"""Segmentation under corruption: counts and IoU, label maps of every layout, the suite `segmentation`."""

import csv
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index
from typer.testing import CliRunner

import steadygaze as sg
from helpers.segmentation import MODEL, SIDE, recipe, squares
from steadygaze import robustness as r
from steadygaze.cli import app
from steadygaze.data.label_maps import CITYSCAPES_IDS, find_label_maps
from steadygaze.data.masks import read_mask
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError
from steadygaze.runs.compare import compare

C = 4


def maps(count: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    said, truth = (torch.randint(0, C, (count, 9, 7), generator=g) for _ in range(2))
    truth[torch.rand(truth.shape, generator=g) < 0.2] = 255
    return said, truth


# -- measures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [False, True], ids=["all classes", "a class in neither"])
def test_it_agrees_with_torchmetrics(absent):
    said, truth = maps()
    if absent:
        said[said == 2], truth[truth == 2] = 0, 1
    counts = r.confusion(said, truth, C).sum(0)
    wanted = {
        a: multiclass_jaccard_index(said, truth, C, average=a, ignore_index=255) for a in ("macro", "none")
    }
    there = torch.tensor([c for c in range(C) if not (absent and c == 2)])
    assert (
        torch.allclose(r.iou(counts)[there], wanted["none"][there])
        and torch.isnan(r.iou(counts)[2]) == absent
    )
    assert torch.isclose(r.miou(counts), wanted["macro"])
    assert torch.isclose(
        r.pixel_accuracy(counts), multiclass_accuracy(said, truth, C, average="micro", ignore_index=255)
    )


def test_counts_are_of_each_image_and_leave_the_ignored_out():
    said, truth = maps()
    counts = r.confusion(said, truth, C)
    for b in range(len(said)):
        for t in range(C):
            for p in range(C):
                assert counts[b, t, p] == ((truth[b] == t) & (said[b] == p)).sum()
    assert not r.confusion(said, torch.full_like(truth, 255), C).any()
    assert r.confusion(said, truth.to(torch.uint8), C).equal(counts)


def test_the_set_is_summed_before_it_is_divided():
    one, two = torch.tensor([[10, 0], [0, 10]]), torch.tensor([[0, 100], [0, 0]])
    assert r.miou(one) == 1 and r.miou(two) == 0
    assert torch.isclose(r.miou(one + two), torch.tensor((10 / 110 + 10 / 110) / 2))


@pytest.mark.parametrize(
    ("said", "truth", "words"),
    [
        (torch.zeros(1, 2, 2).long(), torch.zeros(1, 2, 3).long(), "of one size"),
        (torch.full((1, 2, 2), 4), torch.zeros(1, 2, 2).long(), "predicted: expected classes 0..3, got 4..4"),
        (
            torch.zeros(1, 2, 2).long(),
            torch.full((1, 2, 2), 128),
            "truth: expected classes 0..3, and 255 for pixels that are not counted, got 128",
        ),
    ],
)
def test_label_maps_that_do_not_fit_are_named(said, truth, words):
    with pytest.raises(sg.InputError, match=words):
        r.confusion(said, truth, C)


def test_both_protocols():
    found = {c: dict.fromkeys(range(1, 6), 0.5) for c in r.CORRUPTIONS}
    found["shot_noise"] |= {4: 0.0, 5: 0.0}
    found["zoom_blur"] = dict.fromkeys(range(1, 6), 0.1)
    assert r.mean_miou(found) == pytest.approx((17 * 0.5 + 0.3 + 0.1) / 19)
    assert r.mean_miou(found, "cityscapes-c") == pytest.approx(0.5), "noise at 1 to 3, and no zoom blur"
    assert len(r.CITYSCAPES_C) == len(set(r.CITYSCAPES_C)) == 16 and set(r.CITYSCAPES_C) <= set(r.CORRUPTIONS)
    assert r.retention(0.3, 0.6) == 0.5
    with pytest.raises(sg.UnknownNameError):
        r.mean_miou(found, "coco-c")
    with pytest.raises(sg.InputError, match="no corruption"):
        r.mean_miou({"zoom_blur": {1: 0.5}}, "cityscapes-c")


# -- label maps ------------------------------------------------------------------------------------


def save(path: Path, values, palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, np.uint8))
    if palette:
        image.putpalette([i % 256 for i in range(768)])
    image.save(path)


def read(found, place: int = 0) -> list:
    item = found.items[place]
    return np.asarray(read_mask(item, found.decode, Image.open(item.path).size)).tolist()


def test_cityscapes(tmp_path):
    for city in ("bonn", "aachen"):
        for split, kind in (("val", "labelTrainIds"), ("train", "labelIds")):
            save(tmp_path / "leftImg8bit" / split / city / f"{city}_0_leftImg8bit.png", np.zeros((2, 2, 3)))
            values = [[0, 18], [255, 7]] if kind == "labelTrainIds" else [[7, 33], [0, 20]]
            save(tmp_path / "gtFine" / split / city / f"{city}_0_gtFine_{kind}.png", values)
    found = find_label_maps(tmp_path)
    assert (found.layout, found.classes, len(found.items), found.names[0]) == ("Cityscapes", 19, 2, "road")
    assert found.items[0].name == "leftImg8bit/val/aachen/aachen_0_leftImg8bit.png" and read(found) == [
        [0, 18],
        [255, 7],
    ]
    assert read(find_label_maps(tmp_path, part="train")) == [[0, 18], [255, 7]] and len(CITYSCAPES_IDS) == 19


def acdc(folder: Path, part: str = "val", kind: str = "labelTrainIds") -> Path:
    """ACDC's layout with one image of each condition."""
    for number, condition in enumerate(("fog", "night", "rain", "snow")):
        stem = f"GOPR{number}_frame_000001"
        sequence = Path(condition) / part / f"GOPR{number}"
        values = [[number, 18], [255, 7]] if kind == "labelTrainIds" else [[7, 33], [0, 20]]
        save(folder / "rgb_anon" / sequence / f"{stem}_rgb_anon.png", np.zeros((2, 2, 3)))
        save(folder / "gt" / sequence / f"{stem}_gt_{kind}.png", values)
    return folder


def test_acdc(tmp_path):
    acdc(tmp_path)
    acdc(tmp_path, "train", "labelIds")
    found = find_label_maps(tmp_path)
    assert (found.layout, found.classes, len(found.items), found.names[18]) == ("ACDC", 19, 4, "bicycle")
    assert sorted(item.name.split("/")[1] for item in found.items) == ["fog", "night", "rain", "snow"]
    assert found.items[0].name == "rgb_anon/fog/val/GOPR0/GOPR0_frame_000001_rgb_anon.png"
    assert read(found, 3) == [[3, 18], [255, 7]]
    assert read(find_label_maps(tmp_path, part="train")) == [[0, 18], [255, 7]]
    (tmp_path / "rgb_anon" / "sleet").mkdir()
    with pytest.raises(InputError, match=r"ACDC: expected folders fog, night, rain, snow in .*, got sleet"):
        find_label_maps(tmp_path)
    (tmp_path / "rgb_anon" / "sleet").rmdir()
    shutil.rmtree(tmp_path / "rgb_anon" / "snow" / "val")
    with pytest.raises(InputError, match=r"ACDC: .*snow/val is missing"):
        find_label_maps(tmp_path)


def test_acdc_is_measured_by_condition(tmp_path):
    rng = np.random.default_rng(0)
    for condition in ("fog", "night"):
        for number in range(2):
            stem, sequence = f"GOPR{number}_frame_1", Path(condition) / "val" / f"GOPR{number}"
            save(tmp_path / "rgb_anon" / sequence / f"{stem}_rgb_anon.png", rng.integers(0, 255, (32, 32, 3)))
            save(tmp_path / "gt" / sequence / f"{stem}_gt_labelTrainIds.png", rng.integers(0, 19, (32, 32)))
    torch.manual_seed(0)
    model = sg.modules.segmenter(timm.create_model("vit_tiny_patch16_224", **MODEL), 19).eval()
    half = (0.5, 0.5, 0.5)
    config = {"input_size": (3, 32, 32), "mean": half, "std": half, "crop_pct": 1.0}
    loaded = sg.load_model(
        model, preprocess=Preprocess.from_timm({**config, "interpolation": "bicubic", "crop_mode": "center"})
    )
    rows = sg.stress(loaded, tmp_path, "segmentation", corruptions="fog", severities="3")
    (card,) = rows.cards()
    for condition in ("fog", "night"):
        own = [row for row in rows if row["setting"] == "clean" and f"/{condition}/" in row["image"]]
        counts = torch.zeros(3, 19)
        for row in own:
            detail = torch.tensor(row["detail"]).view(-1, 4)
            counts[:, detail[:, 0]] += detail[:, 1:].T
        iou = counts[0] / (counts[1] + counts[2] - counts[0])
        number = card.numbers[f"acdc/{condition}", "miou"]
        assert len(own) == number.images == 2 and number.value == pytest.approx(iou.nanmean().item())
    assert "acdc/rain" not in {label for label, _ in card.numbers}


def test_ade20k(tmp_path):
    for part in ("training", "validation"):
        save(tmp_path / "images" / part / "a.png", np.zeros((2, 2, 3)))
        save(tmp_path / "annotations" / part / "a.png", [[0, 1], [150, 2]])
    save(tmp_path / "images" / "validation" / "b.png", np.zeros((2, 2, 3)))
    found = find_label_maps(tmp_path)
    assert (found.layout, found.classes, found.without, found.names) == ("ADE20K", 150, 1, None)
    assert read(found) == [[255, 0], [149, 1]]
    save(tmp_path / "annotations" / "validation" / "a.png", np.zeros((2, 2, 3)))
    with pytest.raises(sg.ImageError, match="one channel of 8 bits, got an image of mode RGB"):
        read(found)


def test_pascal_voc(tmp_path):
    for stem, values in (("one", [[0, 20], [255, 5]]), ("two", [[1, 1], [1, 1]])):
        save(tmp_path / "JPEGImages" / f"{stem}.jpg", np.zeros((2, 2, 3)))
        save(tmp_path / "SegmentationClass" / f"{stem}.png", values, palette=True)
        listing = tmp_path / "ImageSets" / "Segmentation" / f"{'val' if stem == 'one' else 'train'}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text(f"{stem}\n")
    found = find_label_maps(tmp_path)
    assert (found.layout, found.classes, found.names[:2], len(found.items)) == (
        "Pascal VOC",
        21,
        ("background", "aeroplane"),
        1,
    )
    assert read(found) == [[0, 20], [255, 5]]
    assert find_label_maps(tmp_path, part="train").items[0].name == "JPEGImages/two.jpg"


def test_maps_of_your_own(tmp_path):
    save(tmp_path / "images" / "a.jpg", np.zeros((2, 2, 3)))
    save(tmp_path / "images" / "deep" / "b.png", np.zeros((2, 2, 3)))
    save(tmp_path / "maps" / "a.png", [[0, 1], [2, 255]])
    (tmp_path / "maps" / "classes.txt").write_text("ground\nsea\nsky\n")
    found = find_label_maps(tmp_path / "images", tmp_path / "maps")
    assert (found.layout, found.classes, found.names, found.without) == (
        "your own",
        3,
        ("ground", "sea", "sky"),
        1,
    )
    assert read(found) == [[0, 1], [2, 255]]
    save(tmp_path / "maps" / "a.png", [[0, 1], [7, 255]])
    with pytest.raises(
        sg.ImageError, match=r"expected classes 0..2, and 255 for pixels that are not counted, got \[7\]"
    ):
        read(found)
    (tmp_path / "maps" / "classes.txt").write_text("ground\n")
    with pytest.raises(sg.InputError, match="expected 2 to 255 class names, one on each line, got 1"):
        find_label_maps(tmp_path / "images", tmp_path / "maps")


def test_masks_of_an_object(tmp_path):
    found = find_label_maps(squares(tmp_path / "data", 4), limit=3)
    assert (found.layout, found.classes, found.names, len(found.items)) == (
        "index.csv",
        2,
        ("background", "object"),
        3,
    )
    coded = np.asarray(Image.open(found.items[0].mask))
    assert np.array_equal(np.array(read(found)), np.select([coded == 255, coded == 128], [1, 255], 0))
    with pytest.raises(sg.InputError, match="segmentation: expected a folder of masks"):
        (tmp_path / "bare" / "1").mkdir(parents=True)
        save(tmp_path / "bare" / "1" / "a.png", np.zeros((2, 2, 3)))
        find_label_maps(tmp_path / "bare")


# -- a run in memory -------------------------------------------------------------------------------


class Bright(nn.Module):
    """Predicts 1 where an image is bright, at a fourth of its size, in each output format of segmenters."""

    def __init__(self, form: str = "tensor", broken: bool = False) -> None:
        super().__init__()
        self.form, self.broken, self.weight = form, broken, nn.Parameter(torch.ones(()))

    def forward(self, images):
        gray = nn.functional.avg_pool2d(images.mean(1, keepdim=True), 4) * self.weight
        scores = torch.cat([-gray, gray], 1)
        if self.broken:
            scores[0] = float("nan")
        return {
            "tensor": scores,
            "dict": {"out": scores, "aux": scores * 0},
            "logits": SimpleNamespace(logits=scores),
        }[self.form]


def batches(count: int = 3):
    rng = np.random.default_rng(0)
    labels = torch.zeros(count, SIDE, SIDE, dtype=torch.long)
    labels[:, 8:24, 8:24] = 1
    labels[:, :4] = 255
    pixels = (
        torch.from_numpy(rng.random((count, 3, SIDE, SIDE), dtype=np.float32)) * 0.2
        + 0.1
        + 0.6 * (labels == 1)[:, None]
    )
    return [(((pixels * 255).round() / 255 - 0.5) / 0.5, labels)]


HOW = {
    "suites": "segmentation",
    "corruptions": "fog,shot_noise,zoom_blur",
    "severities": "1,5",
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
}


@pytest.mark.parametrize("form", ["tensor", "dict", "logits"])
def test_any_segmenter_is_measured(form):
    rows = sg.stress(Bright(form), batches(), **HOW)
    (card,) = rows.cards(repeats=50)
    images, labels = batches()[0]
    model = Bright()
    counts = r.confusion(r.label_map(model, images), labels, 2)
    assert card.numbers["clean", "miou"].value == pytest.approx(float(r.miou(counts.sum(0))))
    assert card.numbers["clean", "pixel_accuracy"].value == pytest.approx(
        float(r.pixel_accuracy(counts.sum(0)))
    )
    assert card.numbers["clean", "iou_1"].value == pytest.approx(float(r.iou(counts.sum(0))[1]))
    values = [row["value"] for row in rows if row["setting"] == "clean"]
    assert values == pytest.approx(r.miou(counts).tolist(), abs=1e-6)
    single = {
        name: {s: card.numbers[f"{name}/{s}", "miou"].value for s in (1, 5)}
        for name in ("fog", "shot_noise", "zoom_blur")
    }
    mean = card.numbers["corruptions", "mean_miou"]
    assert mean.value == pytest.approx(r.mean_miou(single)) and mean.low <= mean.value <= mean.high
    assert card.numbers["corruptions", "mean_miou_cityscapes_c"].value == pytest.approx(
        r.mean_miou(single, "cityscapes-c")
    )
    kept = card.numbers["corruptions", "retention"]
    assert (
        kept.value == pytest.approx(mean.value / card.numbers["clean", "miou"].value)
        and kept.text().count("±") == 1
    )
    assert card.numbers["fog", "miou"].value == pytest.approx(np.mean(list(single["fog"].values())))
    assert len(rows) == 3 * 7


def test_the_interval_is_of_resampled_images():
    """The scores of resampled data sets, computed slowly: the counts of the drawn images, added up."""
    from steadygaze.runs.statistics import draws

    rows = sg.stress(Bright(), batches(5), **HOW)
    (card,) = rows.cards(repeats=20)
    by_name = {
        row["image"]: np.array(row["detail"]).reshape(-1, 4)
        for row in rows
        if row["setting"] == "shot_noise/5"
    }
    times, wanted = next(draws(5, 20, seed=0)), []
    for taken in times:
        sums = np.zeros((2, 3))
        for place, name in enumerate(sorted(by_name)):
            for c, *counts in by_name[name]:
                sums[c] += taken[place] * np.array(counts)
        wanted.append(np.mean([right / (said + true - right) for right, said, true in sums if said + true]))
    assert card.numbers["shot_noise/5", "miou"].samples[1:] == pytest.approx(wanted)


def test_broken_scores_are_flagged():
    rows = sg.stress(Bright(broken=True), batches(), **HOW)
    assert rows.flagged["clean", "broken logits"] == 1
    (card,) = rows.cards(repeats=10)
    assert card.numbers["clean", "miou"].images == 2 and np.isfinite(card.numbers["clean", "miou"].value)


def test_a_kind_of_model_or_label_that_does_not_fit_is_named():
    classifier = timm.create_model("vit_tiny_patch16_224", num_classes=3, **MODEL)
    images, labels = batches()[0]
    with pytest.raises(sg.UnsupportedModelError, match="expected a segmenter"):
        sg.stress(classifier, batches(), **HOW)
    with pytest.raises(sg.InputError, match=r"expected label maps \(3, 32, 32\) of integers"):
        sg.stress(Bright(), [(images, torch.zeros(3).long())], **HOW)
    with pytest.raises(sg.InputError, match=r"expected classes 0..1, got 0..2"):
        sg.stress(Bright(), [(images, labels.masked_fill(labels == 1, 2))], **HOW)
    with pytest.raises(sg.InputError, match="Run it alone"):
        sg.stress(Bright(), batches(), suites="segmentation,attacks")
    for form in ("tensor", "dict", "logits"):
        with pytest.raises(sg.UnsupportedModelError, match="suite segmentation"):
            sg.stress(Bright(form), [(images, torch.zeros(3).long())], suites="corruptions")


# -- a run over a folder ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("segmenter")
    data = squares(place / "data", 6)
    sg.train(recipe(data, epochs=8, data={"train": str(data), "crop": 1.0}), place / "run")
    return place / "run", data


def stress(trained, out: Path, **more):
    run, data = trained
    loaded = sg.load_model(str(run))
    return sg.stress(
        loaded, data, "segmentation", corruptions="fog,contrast", severities="3", out=out, **more
    )


@pytest.mark.full
def test_a_folder_is_run_and_gone_on_with(trained, tmp_path):
    whole = stress(trained, tmp_path / "whole", batch_size=4)
    lines = (tmp_path / "whole" / "rows-00000.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 6 * 3
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    (tmp_path / "again" / "rows-00000.jsonl").write_text("".join(lines[:7]) + lines[7][:9])
    again = stress(trained, tmp_path / "again", batch_size=4, num_workers=1)

    def key(row):
        return row["image"], row["setting"]

    assert sorted(again, key=key) == sorted(whole, key=key)
    (card,) = whole.cards(repeats=20)
    assert card.numbers["clean", "miou"].value > 0.7 and ("clean", "iou_object") in card.numbers
    assert card.run["settings"]["segments"] == ["background", "object"]


def test_the_map_is_cropped_as_the_image_is(trained, tmp_path):
    """Images twice as wide: the model sees the middle half, and so does the map."""
    run, data = trained
    wide = tmp_path / "wide"
    for part in ("images", "masks"):
        (wide / part).mkdir(parents=True)
        for path in (data / part).iterdir():
            image = Image.open(path)
            made = Image.new(image.mode, (2 * SIDE, SIDE), (90, 90, 90) if part == "images" else 255)
            made.paste(image, (SIDE // 2, 0))
            made.save(wide / part / path.name)
    (wide / "index.csv").write_text((data / "index.csv").read_text())
    loaded = sg.load_model(str(run))
    both = [
        sg.stress(loaded, folder, "segmentation", corruptions="contrast", severities="1")
        for folder in (data, wide)
    ]
    assert [row["detail"] for row in both[0]] == [row["detail"] for row in both[1]]


def test_a_mask_that_does_not_fit_is_told_of(trained, tmp_path):
    run, _ = trained
    data = squares(tmp_path / "data", 3)
    Image.new("L", (5, 5)).save(data / "masks" / "1.png")
    rows = sg.stress(
        sg.load_model(str(run)), data, "segmentation", corruptions="fog", severities="1", out=tmp_path / "out"
    )
    assert (
        "Both must have the same size" in rows.unreadable["images/1.png"]
        and len({row["image"] for row in rows}) == 2
    )


def test_the_command_the_report_and_the_comparison(trained, tmp_path):
    run, data = trained
    command = [
        "stress",
        "--model",
        str(run),
        "--data",
        str(data),
        "--suites",
        "segmentation",
        "--corruptions",
        "fog,gaussian_noise",
        "--severities",
        "1,5",
        "--num-workers",
        "0",
        "--out",
    ]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "a")])
    assert done.exit_code == 0, done.output
    for words in (
        "miou at 5",
        "gaussian_noise",
        "object",
        "retention",
        "corruptions mean_miou_cityscapes_c",
        "6 images are few",
    ):
        assert words in done.output, words
    report = CliRunner().invoke(app, ["report", str(tmp_path / "a")])
    page = (tmp_path / "a" / "report.html").read_text()
    assert (
        report.exit_code == 0
        and "mIoU by corruption" in page
        and "mIoU by severity" in page
        and "retention" in page
    )
    assert (
        "Images are left out" not in page
        and "colored by the class that the model predicts for each pixel" in page
    )
    table = list(csv.DictReader((tmp_path / "a" / "table.csv").open()))
    assert {"miou", "mean_miou", "retention", "iou_object"} <= {row["metric"] for row in table}
    assert CliRunner().invoke(app, [*command, str(tmp_path / "b"), "--seed", "1"]).exit_code == 0
    sides = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "compare.html")]
    compared = CliRunner().invoke(app, ["compare-models", *sides, "--no-images"])
    assert compared.exit_code == 0, compared.output
    assert "retention" in compared.output and "newly" not in compared.output
    found = {c.key: c for c in compare([tmp_path / "a"], [tmp_path / "b"]).changes}
    assert found["clean", "miou"].difference == 0 and found["gaussian_noise/5", "miou"].images == 6


def test_classes_must_be_those_of_the_masks(trained, tmp_path):
    run, _ = trained
    save(tmp_path / "images" / "validation" / "a.png", np.zeros((SIDE, SIDE, 3)))
    save(tmp_path / "annotations" / "validation" / "a.png", np.ones((SIDE, SIDE)))
    with pytest.raises(sg.InputError, match=r"has 2 classes, the masks of .* \(ADE20K\) have 150"):
        sg.stress(sg.load_model(str(run)), tmp_path, "segmentation")


def test_a_segmenter_of_another_library(tmp_path):
    """What the embedded model was trained to says its preprocessing as timm does: the maps follow."""
    data = squares(tmp_path / "data", 3)
    sg.train(recipe(data, model={"name": "embedded"}, epochs=1), tmp_path / "run")
    rows = sg.stress(
        sg.load_model(str(tmp_path / "run")), data, "segmentation", corruptions="fog", severities="1"
    )
    assert len(rows) == 6 and not rows.unreadable


# -- models by name --------------------------------------------------------------------------------


def transformers_folder(kind: str, folder: Path, side: int = 32) -> Path:
    import transformers as t

    if kind == "segformer":
        config = t.SegformerConfig(
            num_labels=2,
            depths=[1] * 4,
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1] * 4,
            decoder_hidden_size=8,
        )
        model, processor = (
            t.SegformerForSemanticSegmentation(config),
            t.SegformerImageProcessor(size={"height": side, "width": side}),
        )
    elif kind == "beit":
        config = t.BeitConfig(
            num_labels=2,
            image_size=64,
            patch_size=16,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=16,
            out_indices=[1, 2, 3, 4],
            use_relative_position_bias=True,
        )
        processor = t.BeitImageProcessor(size={"height": 64, "width": 64}, do_center_crop=False)
        model = t.BeitForSemanticSegmentation(config)
    elif kind == "dpt":
        config = t.DPTConfig(
            num_labels=2,
            image_size=32,
            patch_size=16,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=16,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8] * 4,
            fusion_hidden_size=8,
            is_hybrid=False,
        )
        model, processor = (
            t.DPTForSemanticSegmentation(config),
            t.DPTImageProcessor(size={"height": 32, "width": 32}),
        )
    else:
        inside = t.SwinConfig(
            image_size=64,
            embed_dim=8,
            depths=[1] * 4,
            num_heads=[1] * 4,
            window_size=2,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        config = t.UperNetConfig(
            backbone_config=inside, num_labels=2, hidden_size=8, auxiliary_in_channels=32, pool_scales=[1, 2]
        )
        model, processor = (
            t.UperNetForSemanticSegmentation(config),
            t.SegformerImageProcessor(size={"height": 64, "width": 64}),
        )
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["segformer", "beit", "dpt", "upernet"])
def test_segmenters_of_transformers(tmp_path, kind):
    folder = transformers_folder(kind, tmp_path / kind)
    loaded = sg.load_model(str(folder))
    rows = sg.stress(loaded, squares(tmp_path / "data", 2), "segmentation", corruptions="fog", severities="1")
    assert len(rows) == 4 and sum(next(iter(rows))["detail"][1::4]) <= loaded.size[0] * loaded.size[1]
    images = torch.stack(
        [loaded.preprocess(Image.open(tmp_path / "data" / "images" / f"{i}.png")) for i in range(2)]
    )
    with torch.no_grad():
        logits = loaded.model(images).logits
    assert logits.dim() == 4 and r.label_map(loaded.model, images).shape == (2, *loaded.size)


def test_segmenters_of_torchvision(tmp_path):
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    loaded = sg.load_model("torchvision:lraspp_mobilenet_v3_large", tmp_path / "weights.pth")
    assert loaded.size == (520, 520) and loaded.class_names is None
    rows = sg.stress(
        loaded, squares(tmp_path / "data", 1), "segmentation", corruptions="contrast", severities="1"
    )
    assert len(rows) == 2 and sum(next(iter(rows))["detail"][3::4]) <= 520 * 520
