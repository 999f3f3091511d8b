"""k-NN as a suite of a stress run; and CNNs, which have features but no attention."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import steadygaze as sg
from helpers.benchmark_trees import SPECIES, cifar, plant
from helpers.runs import ask, cli, image_folder, rows_of
from steadygaze.data.images import read_image
from steadygaze.report.pages import write_stress
from steadygaze.robustness import features, knn_predict
from steadygaze.runs.compare import compare
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import World
from steadygaze.runs.stress import run_stress

METRICS = ["knn1", "knn10", "knn1_euclidean", "knn10_euclidean"]


@pytest.fixture(scope="module")
def loaded():
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """train/ with 3 x 8 images, test/ with the same names but other pixels."""
    folder = tmp_path_factory.mktemp("near")
    image_folder(folder / "train")
    for path in sorted((folder / "train").rglob("*.png"))[::2]:
        other = folder / "test" / path.parent.name / path.name
        other.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(Image.open(path))[::-1] // 2).save(other)
    return folder


def frame_of(rows, metric):
    return {row["image"]: row["value"] for row in rows if row["metric"] == metric}


def test_rows_are_the_vote_of_the_nearest_images(root, loaded):
    rows = sg.stress(loaded, None, suites=f"neighbors:own={root}", batch_size=5)
    sides = {}
    for side in ("train", "test"):
        files = sorted((root / side).rglob("*.png"))
        x = torch.stack([loaded.preprocess(read_image(f)) for f in files])
        sides[side] = (
            files,
            features(loaded.model, x),
            torch.tensor([["airplane", "cat", "truck"].index(f.parent.name) for f in files]),
        )
    (_, bank, classes), (files, asked, labels) = sides["train"], sides["test"]
    assert len(files) == 12 and len(rows) == 12 * 4
    for metric in METRICS:
        k, _, way = metric.removeprefix("knn").partition("_")
        right = knn_predict(bank, classes, asked, k=int(k), metric=way or "cosine") == labels
        wanted = {f"own:test/{f.parent.name}/{f.name}": float(r) for f, r in zip(files, right, strict=True)}
        assert frame_of(rows, metric) == wanted
    assert {(r["setting"], r["note"]) for r in rows} == {("neighbors/own", "bank of 24 images")}
    (facts,) = rows.runs[0]["settings"]["neighbors"]
    assert (facts["bank"], facts["images"], facts["classes"]) == (24, 12, 3)
    two = f"neighbors:own={root / 'train'}={root / 'test'}"
    assert [r["value"] for r in sg.stress(loaded, None, suites=two)] == [r["value"] for r in rows]


def test_part_of_it_goes_on_and_is_split(root, tmp_path):
    how = {"suite": f"neighbors:own={root}", "limit": 6, "bank": 12, "batch_size": 2, "num_classes": None}
    whole = run_stress(ask(None, tmp_path / "whole", **how))
    assert {r["note"] for r in whole} == {"bank of 12 images"} and len({r["image"] for r in whole}) == 6
    lines = rows_of(tmp_path / "whole")
    file = tmp_path / "whole" / "rows-00000.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:10]))
    told = []
    run_stress(
        ask(None, tmp_path / "whole", **how),
        on_progress=told.append,
    )
    assert rows_of(tmp_path / "whole") == lines
    assert told[-1].done == 6 + 12 and told[-1].done - told[-1].resumed == 12 + 4
    run_stress(
        ask(None, tmp_path / "whole", **how),
        on_progress=told.append,
    )
    assert told[-1].done == told[-1].resumed == 18, "the bank was made again though nothing was asked of it"
    for rank in (0, 1):
        run_stress(ask(None, tmp_path / "split", **how, num_workers=rank), World(rank, 2, rank == 0))
    assert rows_of(tmp_path / "split") == lines


def test_published_sets_by_name(tmp_path, root):
    _, python, _ = cifar(tmp_path)
    plant(
        tmp_path / "xray" / "chest_xray",
        [f"{s}/{c}" for s in ("train", "val", "test") for c in ("NORMAL", "PNEUMONIA")],
    )
    plant(tmp_path / "inat", [f"{split}/{name}" for split in ("train_mini", "val") for name in SPECIES])
    names = {"cifar-100": python, "pneumonia": tmp_path / "xray", "inaturalist-2021-mini": tmp_path / "inat"}
    suite = ",".join(f"neighbors:{name}={folder}" for name, folder in names.items())
    words = ["--model", "embedded", "--num-workers", 0, "--suites", suite, "--out", tmp_path / "run"]
    assert "expected 5216 images" in cli(*words, code=2) and not (tmp_path / "run").exists()
    said = cli(*words, "--partial")
    assert "pneumonia: 4 of 5216 images" in said and "2 of 10000 species" in said and "knn1" in said
    rows = Rows.read(tmp_path / "run")
    found = {(r["setting"], r["metric"]) for r in rows}
    assert found == {(f"neighbors/{n}", m) for n in names for m in ("knn1", "knn1_euclidean")}, (
        "k = 10 of a bank of 4"
    )
    assert {r["image"] for r in rows if "cifar" in r["setting"]} == {
        "cifar-100:test/000000",
        "cifar-100:test/000001",
    }
    page = write_stress(rows, tmp_path / "report.html")[0].read_text()
    assert "Classes it was not trained on" in page and "pneumonia, k = 1" in page


@pytest.mark.full
def test_beside_the_other_suites_and_compared(root, tmp_path, loaded):
    data = root / "train"
    suite = ["corruptions", f"neighbors:own={root}"]
    for name in ("a", "b"):
        sg.stress(loaded, data, suites=suite, corruptions="fog", severities=[1], limit=6, out=tmp_path / name)
    card = Rows.read(tmp_path / "a").cards(repeats=20)[0]
    assert card.image_count == 6 and card.numbers["neighbors/own", "knn1"].images == 6
    found = compare([tmp_path / "a"], [tmp_path / "b"], repeats=20)
    (change,) = [c for c in found.changes if c.quantity.name == "knn10"]
    assert change.difference == 0 and change.p == 1


def test_what_is_refused(tmp_path, root, loaded):
    def says(suite, match, model=loaded, data=None, **more):
        with pytest.raises((sg.InputError, sg.UnsupportedModelError), match=match):
            sg.stress(model, data, suites=suite, **more)

    says("neighbors:own", "neighbors:NAME=FOLDER or neighbors:NAME=TRAIN=TEST")
    says(f"neighbors:own={root},neighbors:own={root}", "given twice")
    says(f"neighbors:own={tmp_path / 'nowhere'}", "does not exist")
    says(f"neighbors:cifar100={tmp_path}", r"train.* does not exist|published set is called .*cifar-100")
    says([f"neighbors:own={root}", "corruptions"], "data: expected a folder of images, got none")
    says(f"neighbors:own={root}", "bank: expected a whole number of 1 or more", bank=0)
    says(
        f"neighbors:own={root}",
        "expected data in a folder",
        data=[(torch.zeros(1, 3, 32, 32), torch.zeros(1).long())],
    )
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("L", (3, 3)).save(tmp_path / "train" / "cat" / "gray.png")
    (tmp_path / "test" / "zebra").mkdir(parents=True)
    says(f"neighbors:own={tmp_path}", "match no class: zebra")
    (tmp_path / "test" / "zebra").rename(tmp_path / "test" / "cat")
    says(f"neighbors:own={tmp_path}", "found none in cat")
    (tmp_path / "test" / "cat" / "broken.png").write_bytes(b"no image")
    rows = sg.stress(loaded, None, suites=f"neighbors:own={tmp_path}")
    assert list(rows.unreadable) == ["own:test/cat/broken.png"] and len(rows) == 0


# -- CNNs by name ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cnn(tmp_path_factory):
    """A timm CNN of three classes, saved as by old PyTorch versions: without counters in its batch norms."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    file = tmp_path_factory.mktemp("cnn") / "w.pth"
    torch.save({k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}, file)
    return file


def test_a_cnn_by_name(cnn, root, tmp_path):
    for i, name in enumerate(("airplane", "cat", "truck")):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / str(i)).symlink_to(root / "train" / name)
    words = [
        "--model",
        "test_resnet",
        "--checkpoint",
        cnn,
        "--data",
        tmp_path / "data",
        "--limit",
        3,
        "--num-workers",
        0,
        "--corruptions",
        "fog",
        "--severities",
        1,
        "--epsilons",
        "8/255",
        "--pgd-steps",
        1,
        "--out",
        tmp_path / "run",
    ]
    said = cli(*words, "--suites", f"corruptions,attacks,occlusion,neighbors:own={root}", "--bank", 6)
    assert "test_resnet is not a vision transformer, it has no tokens to drop" in said
    settings = {r["setting"] for r in Rows.read(tmp_path / "run")}
    assert settings == {"clean", "fog/1", "fgsm/8", "pgd/8", "center_square/0.5", "neighbors/own"}
    assert "attention: test_resnet is not a vision transformer. Leave the suite attention out" in cli(
        *words, "--suites", "attention", code=2
    )


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Conv2d(3, 10, 32)

    def forward(self, x):
        return self.last(x).flatten(1)


def test_a_head_that_is_no_linear_map_is_refused_before_anything_is_read(root, loaded):
    from dataclasses import replace

    with pytest.raises(sg.UnsupportedModelError, match="ends in a linear layer"):
        sg.stress(replace(loaded, model=Convolved()), None, suites=f"neighbors:own={root}")
