"""Shape or texture: the reader of cue-conflict images, and the suite against an independent oracle."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from oracles import shape_bias as oracle
from steadygaze.cli import app
from steadygaze.data.datasets.cue_conflict import read_cue_conflict, sixteen_classes
from steadygaze.data.images import read_image
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError
from steadygaze.report.pages import write_stress
from steadygaze.robustness.by_class import wilson
from steadygaze.robustness.cue_conflict import group_decisions, shape_bias
from steadygaze.runs.compare import compare

MODEL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 8,
    "depth": 1,
    "num_heads": 2,
    "num_classes": 1000,
}
MODEL |= {"class_token": False, "global_pool": "avg"}
CLASSES = tuple(sixteen_classes())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of the 16 shapes with every second texture, its own too: 8 images each, 16 of them agreeing."""
    folder = tmp_path_factory.mktemp("cues")
    rng = np.random.default_rng(0)
    for i, shape in enumerate(CLASSES):
        (folder / shape).mkdir()
        for texture in CLASSES[i % 2 :: 2]:
            pixels = np.kron(rng.integers(0, 255, (2, 2, 3)), np.ones((10, 10, 1))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / shape / f"{shape}1-{texture}3.png")
    return folder


@pytest.fixture(scope="module")
def model() -> sg.LoadedModel:
    """A tiny model whose decisions are spread over the 16 classes."""
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", **MODEL)
    torch.nn.init.normal_(net.patch_embed.proj.weight, std=1.0)
    torch.nn.init.normal_(net.head.weight, std=3.0)
    half = (0.5, 0.5, 0.5)
    config = {"input_size": (3, 16, 16), "mean": half, "std": half, "crop_pct": 1.0}
    config |= {"interpolation": "bicubic", "crop_mode": "center"}
    return sg.load_model(net, preprocess=Preprocess.from_timm(config))


def test_the_suite_agrees_with_the_oracle(data: Path, model: sg.LoadedModel, tmp_path: Path) -> None:
    rows = sg.stress(model, None, suites=[f"cue_conflict:{data}"], partial=True, batch_size=7, out=tmp_path)
    names = [path.relative_to(data).as_posix() for path in sorted(data.rglob("*.png"))]
    decisions = {}
    for name in names:
        with torch.no_grad():
            logits = model.model(model.preprocess(read_image(data / name))[None])[0]
        decisions[name] = oracle.decide(logits.double().tolist(), sixteen_classes())
    assert len(set(decisions.values())) > 5, "the test would prove little"
    (card,) = rows.cards()
    number = card.numbers["cue_conflict", "shape_bias"]
    assert number.value == pytest.approx(oracle.shape_bias(decisions), abs=1e-12)
    conflicting = {
        n: d for n, d in decisions.items() if n.split("/")[1].split("1")[0] != n.split("-")[1][:-5]
    }
    assert len(conflicting) == 128 - 16 and len(rows.to_pandas()) == 2 * len(conflicting)
    decided = {n: d for n, d in conflicting.items() if d in (n.split("/")[0], n.split("-")[1][:-5])}
    by_shape = [d == n.split("/")[0] for n, d in decided.items()]
    share = wilson(sum(by_shape), len(decided))
    assert (number.low, number.high) == (share.low, share.high) and number.images == len(decided)
    for name in CLASSES:
        own = {n: d for n, d in decided.items() if n.startswith(f"{name}/")}
        if own:
            part = card.numbers[f"cue_conflict/{name}", "shape_bias"]
            assert part.value == pytest.approx(oracle.shape_bias(own)) and part.images == len(own)
            assert part.low < part.value < part.high or part.value in (0, 1)
        else:
            assert (f"cue_conflict/{name}", "shape_bias") not in card.numbers
    assert any(
        "16 images left out: both cues are one class" in note for note in card.run["settings"]["notes"]
    )


def test_resume_report_and_comparison(data: Path, model: sg.LoadedModel, tmp_path: Path) -> None:
    options = {"suites": [f"cue_conflict:{data}"], "partial": True}
    for name in ("a", "b"):
        sg.stress(model, None, **options, out=tmp_path / name)
    again = sg.stress(model, None, **options, out=tmp_path / "a")
    assert len(again.to_pandas()) == 2 * 112
    page = write_stress(again, tmp_path / "report.html")[0].read_text(encoding="utf-8")
    assert "Shape bias by shape class" in page
    changes = compare([tmp_path / "a"], [tmp_path / "b"], repeats=20).changes
    (whole,) = [c for c in changes if c.key == ("cue_conflict", "shape_bias")]
    assert whole.difference == 0 and whole.verdict == ""


def test_the_command(data: Path, tmp_path: Path) -> None:
    given = ["stress", "--model", "embedded", "--out", str(tmp_path / "run"), "--suites"]
    done = CliRunner().invoke(app, [*given, f"cue_conflict:{data}", "--partial"])
    assert done.exit_code == 2 and "16 classes are groups of ImageNet's 1,000" in " ".join(
        done.output.split()
    )
    done = CliRunner().invoke(app, [*given, "cue_conflict"])
    assert done.exit_code == 2 and "expected cue_conflict:FOLDER" in " ".join(done.output.split())


def test_limits_visit_the_classes_evenly(data: Path) -> None:
    items = read_cue_conflict(data, partial=True).items[:16]
    assert {item.label for item in items} == set(range(16))


def test_groups_of_the_authors() -> None:
    groups = sixteen_classes()
    indices = [index for group in groups.values() for index in group]
    assert len(groups) == 16 and len(indices) == len(set(indices)) == 207
    assert groups["cat"] == (281, 282, 283, 284, 285, 286) and groups["keyboard"] == (508, 878)


def test_decisions_are_of_mean_probabilities() -> None:
    """Not of summed ones, which favor large groups, and not of mean logits."""
    logits = torch.tensor([[3.0, 3.0, 3.0, 3.5, -20.0], [0.0, 0.0, 0.0, 1.0, -20.0]])
    assert group_decisions(logits, [[0, 1, 2], [3]]).tolist() == [1, 1]
    assert group_decisions(logits[:1], [[0], [3, 4]]).tolist() == [0]
    assert np.isnan(shape_bias(np.array([2]), np.array([0]), np.array([1])))
    with pytest.raises(InputError, match="from 0 to 4"):
        group_decisions(logits, [[0], [5]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: shutil.rmtree(f / "cat"), "lacks 1 of 16 shape class folders: cat"),
        (lambda f: (f / "catt").mkdir(), "holds shape class folders that match no class: catt"),
        (
            lambda f: (f / "cat/cat1-dog1.png").rename(f / "cat/cat.png"),
            r"such as cat1-truck3.png, got .*cat.png",
        ),
        (
            lambda f: (f / "cat/cat1-dog1.png").rename(f / "cat/dog1-cat1.png"),
            "expected a file of the shape cat",
        ),
        (
            lambda f: (f / "cat/cat1-dog1.png").rename(f / "cat/cat1-dgo1.png"),
            "the texture 'dgo', which is no",
        ),
        (lambda f: None, "expected 1280 images in .*, found 16"),
        (lambda f: (f / "classes.json").write_text("{"), "cannot be read as JSON"),
        (
            lambda f: (f / "classes.json").write_text('{"cat": [1], "dog": [1000]}'),
            "dog: expected ImageNet indices",
        ),
        (
            lambda f: (f / "classes.json").write_text('{"cat": [1], "dog": [1]}'),
            "1 belongs to both cat and dog",
        ),
        (lambda f: (f / "classes.json").write_text("[1, 2]"), "to map classes to ImageNet indices"),
    ],
)
def test_layouts_that_do_not_fit_are_named(change, message: str, tmp_path: Path) -> None:
    for shape in CLASSES:
        (tmp_path / shape).mkdir()
        texture = "dog" if shape != "dog" else "cat"
        Image.new("RGB", (4, 4)).save(tmp_path / shape / f"{shape}1-{texture}1.png")
    change(tmp_path)
    with pytest.raises(InputError, match=message):
        read_cue_conflict(tmp_path)


def test_classes_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(json.dumps({"cat": [3], "dog": [4, 5]}))
    for shape, texture in (("cat", "dog"), ("dog", "cat"), ("dog", "dog")):
        (tmp_path / shape).mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / shape / f"{shape}1-{texture}2.jpg")
    found = read_cue_conflict(tmp_path, partial=True)
    assert found.groups == {"cat": (3,), "dog": (4, 5)} and found.agreeing == 1
    assert {(item.name, item.label, item.texture) for item in found.items} == {
        ("cat/cat1-dog2.jpg", 0, 1),
        ("dog/dog1-cat2.jpg", 1, 0),
    }
    with pytest.raises(InputError, match="does not exist"):
        read_cue_conflict(tmp_path / "gone")
