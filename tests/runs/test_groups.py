"""Groups of images: a planted shortcut is found by the worst group; tables that define groups are read."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from helpers.shards import png
from oracles import groups as oracle
from steadygaze.cli import app
from steadygaze.data.folders import ClassLookup
from steadygaze.data.masks import find_labeled_images
from steadygaze.data.preprocess import Preprocess
from steadygaze.report.pages import write_stress
from steadygaze.robustness.by_class import wilson
from steadygaze.runs.compare import compare

SIDE, MARKS = 16, {"red": (255, 0, 0), "blue": (0, 0, 255)}
HALF = (0.5, 0.5, 0.5)
CONFIG = {"input_size": (3, SIDE, SIDE), "mean": HALF, "std": HALF, "crop_pct": 1.0}
CONFIG |= {"interpolation": "bicubic", "crop_mode": "center"}


def drawn(rng: np.random.Generator, label: int, mark: str) -> np.ndarray:
    """Stripes, horizontal or vertical by class, in noise; and a mark in the corner."""
    pixels = 128 + 40 * np.sign(np.sin(np.arange(SIDE) * np.pi / 2 + 0.1))[:, None] * np.ones((1, SIDE))
    pixels = (pixels.T if label else pixels)[..., None] + 25 * rng.standard_normal((SIDE, SIDE, 3))
    pixels[:4, :4] = MARKS[mark]
    return pixels.clip(0, 255).astype(np.uint8)


def trained(shortcut: bool) -> torch.nn.Module:
    """A tiny ViT; in training, stripes go with the class in 3 of 4 images, the mark always or by chance."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 256)
    marks = labels if shortcut else rng.integers(0, 2, 256)
    stripes = np.where(rng.random(256) < 0.25, 1 - labels, labels)
    images = np.stack([drawn(rng, y, list(MARKS)[m]) for y, m in zip(stripes, marks, strict=True)])
    x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=2
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(net(x), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images; in half of them the mark is that of the other class."""
    folder, rng = tmp_path_factory.mktemp("groups"), np.random.default_rng(1)
    lines = ["image,label,mark"]
    for number in range(24):
        label = number % 2
        mark = list(MARKS)[label if number % 4 < 2 else 1 - label]
        Image.fromarray(drawn(rng, label, mark)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{label},{mark}")
    (folder / "index.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of a model that learned the shortcut, and of one that could not."""
    out = tmp_path_factory.mktemp("runs")
    folders = [out / "shortcut", out / "stripes"]
    for folder in folders:
        model = sg.load_model(trained(folder.name == "shortcut"), preprocess=Preprocess.from_timm(CONFIG))
        options = {"corruptions": "brightness", "severities": "1", "groups": "label,mark"}
        sg.stress(model, data, suites="corruptions", out=folder, **options)
    return folders


def test_the_worst_group_finds_a_planted_shortcut(runs: list[Path], data: Path, tmp_path: Path) -> None:
    cards = [sg.Rows.read(folder).cards()[0] for folder in runs]
    table = [line.split(",") for line in (data / "index.csv").read_text().split()[1:]]
    for card in cards:
        correct = {name: label == predicted for name, (label, predicted) in card.answers.items()}
        groups = {name: f"label={label}, mark={mark}" for name, label, mark in table}
        expected = oracle.accuracies(correct, groups)
        assert len(expected) == 4
        for group, (right, count) in expected.items():
            number = card.numbers[f"clean/{group}", "top1"]
            interval = wilson(right, count)
            assert (number.value, number.low, number.high) == (right / count, interval.low, interval.high)
            assert number.images == count
        worst = card.numbers["clean", "worst_group"]
        assert worst.value == min(right / count for right, count in expected.values())
        assert worst.proportion and worst.low <= worst.value <= worst.high
    shortcut, stripes = (card.numbers["clean", "worst_group"] for card in cards)
    assert shortcut.value < 0.3 and "mark=" in shortcut.note and stripes.value > 0.8
    assert cards[0].numbers["clean", "top1"].value > 0.6  # the mean hides it

    changes = {change.key: change for change in compare(runs[:1], runs[1:]).changes}
    assert changes["clean", "worst_group"].verdict == "better"
    assert any(label.startswith("clean/label=0") for label, _ in changes)
    files = write_stress(sg.Rows.read(runs[0]), tmp_path / "stress.html")
    page = files[0].read_text()
    assert "Accuracy by group" in page and "worst_group" in page
    told = CliRunner().invoke(app, ["compare-models", *map(str, runs), "-o", str(tmp_path / "c.html")])
    assert told.exit_code == 0 and "worst_group" in told.output
    assert "worst_group" in (tmp_path / "c.html").read_text()


def test_groups_of_a_card(data: Path, tmp_path: Path) -> None:
    options = {"-d": data, "--groups": "mark", "--suites": "corruptions", "--corruptions": "fog"}
    options |= {"--severities": 1, "-n": 4, "-o": tmp_path, "--metrics": "insertion_accuracy"}
    words = [str(word) for pair in options.items() for word in pair]
    told = CliRunner().invoke(app, ["card", "embedded", "embedded", *words])
    assert told.exit_code == 0, told.output
    assert "worst_group" in told.output and "clean/mark=red" in told.output
    assert "worst_group" in (tmp_path / "card.html").read_text()


@pytest.mark.parametrize(
    ("groups", "got"), [("mark,mark", "mark, mark"), ("", "none"), (["mark", "mark"], "mark, mark")]
)
def test_columns_of_groups_are_given_once(data: Path, groups: str | list[str], got: str) -> None:
    with pytest.raises(sg.InputError, match=f"columns of the data, each once, got {got}"):
        sg.stress("embedded", data, suites="corruptions", groups=groups)
    words = ["-m", "embedded", "-d", str(data), "-s", "occlusion", "-o", "unused", "--groups"]
    told = CliRunner().invoke(
        app, ["stress", *words, groups if isinstance(groups, str) else ",".join(groups)]
    )
    assert told.exit_code == 2 and "each once" in told.output


WATERBIRDS = "img_id,img_filename,y,split,place\n1,a/1.jpg,0,0,1\n2,a/2.jpg,1,2,0\n3,b/3.jpg,0,2,1\n"
IWILDCAM = "split,location,y,filename\ntrain,5,0,1.jpg\ntest,6,1,2.jpg\nid_test,5,1,3.jpg\n"
CAMELYON17 = (
    ",patient,node,x_coord,y_coord,tumor,slide,center,split\n"
    "0,004,4,3328,21792,1,0,0,0\n1,010,2,11,22,1,20,2,0\n2,010,2,11,33,0,21,2,0\n"
)
PATCH = "patches/patient_010_node_2/patch_patient_010_node_2_x_11_y_{}.png"
OTHERS = "file_name,label,light\nx.png,1,day\ny.png,0,night\n"


@pytest.mark.parametrize(
    ("text", "groups", "expected"),
    [
        (WATERBIRDS, ["y", "place"], {"a/2.jpg": (1, "y=1, place=0"), "b/3.jpg": (0, "y=0, place=1")}),
        (IWILDCAM, ["location"], {"train/2.jpg": (1, "location=6")}),
        (CAMELYON17, ["slide"], {PATCH.format(22): (1, "slide=20"), PATCH.format(33): (0, "slide=21")}),
        (OTHERS, ["light"], {"x.png": (1, "light=day"), "y.png": (0, "light=night")}),
    ],
)
def test_metadata_of_published_data(tmp_path: Path, text: str, groups: list[str], expected: dict) -> None:
    (tmp_path / "metadata.csv").write_text(text)
    (tmp_path / "train").mkdir()
    found = find_labeled_images(tmp_path, None, ClassLookup(None, 2), groups=groups)
    assert found.layout == "metadata.csv"
    assert {item.name: (item.label, item.group) for item in found} == expected
    assert all(item.path == tmp_path / item.name for item in found)


def test_groups_of_a_parquet_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    places = datasets.ClassLabel(names=["land", "water"])
    columns = {
        "image": [{"bytes": png(i), "path": None} for i in range(4)],
        "label": [0, 1, 2, 0],
        "place": [0, 1, 1, 0],
    }
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.Value("int64"), "place": places}
    )
    datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "data.parquet")
    rows = sg.stress(
        "embedded", f"hf:{tmp_path}", "corruptions", corruptions="fog", severities=1, groups="place"
    )
    assert {row["note"] for row in rows} == {"place=land", "place=water"}
    (card,) = rows.cards()
    assert card.numbers["clean/place=water", "top1"].images == 2


@pytest.mark.parametrize(
    ("make", "groups", "message"),
    [
        (lambda data: data, "marc", "unknown column 'marc'. Did you mean 'mark'"),
        (lambda data: "wds:a.tar", "mark", "expected a table with the column mark"),
        (lambda data: [(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))], "mark", "got batches"),
    ],
)
def test_groups_that_are_not_there(data: Path, make, groups: str, message: str) -> None:
    with pytest.raises(sg.SteadygazeError, match=message):
        sg.stress("embedded", make(data), suites="corruptions", groups=groups)


def test_class_folders_have_no_groups(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "0" / "a.png")
    with pytest.raises(sg.InputError, match=r"expected a table with the column mark, such as .*index\.csv"):
        sg.stress("embedded", tmp_path, suites="corruptions", groups="mark")
    (tmp_path / "metadata.csv").write_text(
        "width,height\n1,2\n"
    )  # not a list of images: as if it was not there
    assert find_labeled_images(tmp_path, None, ClassLookup(None, 2)).layout == "class folders"
