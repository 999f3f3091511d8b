"""Runs and pages of multi-label and regression models: what is measured, and what the outputs are called."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers import Siglip2Config, Siglip2ForImageClassification

import steadygaze as sg
from benchmarks import zoo
from oracles.models import random_images, tiny
from steadygaze.app.viewer import Viewer
from steadygaze.cli.explain import ExplainOptions, run
from steadygaze.loading.loaded import LoadedModel
from steadygaze.runs.samples import read_map_samples
from steadygaze.vit.removal import subset_logits


@pytest.fixture(scope="module")
def model():
    return tiny("class")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images in no class folder."""
    generator = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(6):
        pixels = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def embedded(task: str) -> LoadedModel:
    return sg.load_model("embedded", task=task)


def left(vit: sg.ViT, images: torch.Tensor, maps: torch.Tensor, k: int) -> torch.Tensor:
    """Logits with the top k patches alone, one image at a time."""
    keep = torch.zeros(len(images), maps[0].numel(), dtype=torch.bool)
    keep.scatter_(1, maps.flatten(1).argsort(dim=1, descending=True, stable=True)[:, :k], True)
    owner = torch.arange(len(images))
    return subset_logits(vit, images, vit.embed(images), keep, owner, "remove")


@torch.no_grad()
def test_labels_are_verified_by_their_own_probability(model) -> None:
    images = random_images(model, 4)
    vit = sg.adapt(model, task="multilabel")
    labels = torch.tensor([0, 1, 2, 4])
    rows = sg.verify(vit, [(images, labels)], "gae", ratios=[0.5])
    value = {(row["metric"], row["image"]): row["value"] for row in rows}
    maps = sg.explain(vit, images, labels, "gae").scores
    whole, few = (
        y.gather(1, labels[:, None])[:, 0].sigmoid() for y in (vit(images), left(vit, images, maps, 8))
    )
    for b in range(4):
        assert value["insertion_aopc", str(b)] == pytest.approx(100 - 100 * float(whole[b] - few[b]))
        kept = (whole[b] > 0.5) == (few[b] > 0.5)
        assert value["insertion_accuracy", str(b)] == 100 * float(kept)


@torch.no_grad()
def test_values_are_verified_in_their_own_unit(model) -> None:
    images = random_images(model, 3)
    vit = sg.adapt(model, task="regression")
    ages = torch.tensor([31.5, 4.0, 77.25])  # labels of a regression are not classes, and not needed
    rows = sg.verify(vit, [(images, ages)], "gae", target=3, ratios=[0.5])
    value = {(row["metric"], row["image"]): row["value"] for row in rows}
    assert {metric for metric, _ in value} == {"insertion_value", "deletion_value"}
    assert {row["score"] for row in rows} == {"value"}
    maps = sg.explain(vit, images, 3, "gae").scores
    whole, few = vit(images)[:, 3], left(vit, images, maps, 8)[:, 3]
    rest = left(vit, images, -maps, 8)[:, 3]
    for b in range(3):
        assert value["insertion_value", str(b)] == pytest.approx(float(few[b] - whole[b]))
        assert value["deletion_value", str(b)] == pytest.approx(float(whole[b] - rest[b]), abs=1e-9)


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("regression", "insertion_accuracy"),
        ("regression", "class_sensitivity"),
        ("multilabel", "positive_kl"),
    ],
)
def test_metrics_that_the_outputs_lack_are_refused(model, task, metric) -> None:
    data = [(random_images(model), torch.tensor([0, 1]))]
    with pytest.raises(sg.InputError, match=f"{metric} measures classes.* Use insertion_value"):
        sg.verify(sg.adapt(model, task=task), data, "gae", metric, target=0)


def test_sanity_checks_keep_the_task(model) -> None:
    """The shuffled copies of the model are explained as labels too."""
    data = [(random_images(model), torch.tensor([0, 1]))]
    metrics = ["randomization", "class_sensitivity", "positive_perturbation"]
    rows = sg.verify(sg.adapt(model, task="multilabel"), data, "gaze", metrics, mean=[0.5] * 3, std=[0.5] * 3)
    assert all(np.isfinite(row["value"]) for row in rows)
    rows = sg.verify(sg.adapt(model, task="regression"), data, "gaze", "randomization", target=1)
    assert all(np.isfinite(row["value"]) for row in rows)


def test_a_folder_of_a_regression_needs_no_classes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(sg.InputError, match="Give the index of the value"):
        sg.verify(embedded("regression"), folder, "gae", out=out)
    rows = sg.verify(embedded("regression"), folder, "gae", target=2, out=out, random=False)
    assert len(rows) == 12
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert settings["task"] == "regression"
    samples = read_map_samples(out)
    assert samples is not None and samples.best[0].title.startswith("bird ")
    assert "%" not in samples.best[0].title
    assert "deletion_value" in rows.table().markdown()


def test_stress_measures_attention_and_refuses_accuracy(folder: Path, tmp_path: Path) -> None:
    for task in ("multilabel", "regression"):
        with pytest.raises(sg.InputError, match=r"corruptions measures classes.* Use attention"):
            sg.stress(embedded(task), folder, suites="corruptions")
    out = tmp_path / "stress"
    rows = sg.stress(
        embedded("regression"), folder, suites="attention", corruptions="fog", severities="3", out=out
    )
    assert {row["metric"].partition("_")[0] for row in rows} == {"attention"}
    assert json.loads((out / "run.json").read_text())["settings"]["task"] == "regression"
    memory = [(torch.rand(2, 3, 32, 32), torch.tensor([0.5, 2.5]))]
    rows = sg.stress(embedded("regression"), memory, suites="attention", corruptions="fog", severities="3")
    assert len(rows)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_explain_names_labels_and_values(folder: Path, tmp_path: Path, task: str) -> None:
    out = tmp_path / task
    console = Console(record=True, width=140)
    options = ExplainOptions(
        images=[folder], model="embedded", method=["gae"], out=out, target="3", task=task
    )
    assert run(options, console) == 0
    text, manifest = console.export_text(), json.loads((out / "manifest.json").read_text())
    assert "%" not in text and manifest["task"] == task
    entry = manifest["images"][0]["targets"][0]
    assert entry["name"] == "cat"
    if task == "regression":
        assert entry["value"] == pytest.approx(np.load(out / "scores.npz")["logits"][0, 3], abs=1e-5)
        assert "cat " in text and "values" in text
        with pytest.raises(sg.InputError, match="--top"):
            run(replace(options, target="auto", top=2), console)
    else:
        assert 0 < entry["probability"] < 1 and "labels" in text


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_the_page_shows_labels_and_values(folder: Path, task: str) -> None:
    viewer = Viewer(embedded(task))
    image = next(folder.iterdir())
    maps = viewer.maps(image, ["gae"], "cat")
    (curve, _) = viewer.removal_curves(image, maps)
    whole = viewer.predictions(image)["cat"]
    assert curve.deletion[0][1] == pytest.approx(whole, abs=1e-5)
    assert "%" not in viewer.summary(image, [0, 1]) and "%" not in viewer.overlays(image, maps)[0][1]
    label = viewer.prediction_label(image)
    if task == "regression":
        assert f"cat {whole:.4g}" in label and set(curve.scores) == {"insertion_value", "deletion_value"}
    else:
        assert label["cat"] == whole


def test_siglip2_runs_in_verify_and_stress() -> None:
    """It takes patches, not images; a run gives it images as every other model."""
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = Siglip2Config(vision_config={**small, "patch_size": 4, "num_patches": 16}, num_labels=5)
    siglip = zoo.randomize(Siglip2ForImageClassification(config))
    data = [(torch.rand(2, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 3]))]
    assert len(sg.verify(siglip, data, "gae")) == 8
    with pytest.warns(UserWarning, match="normalized"):
        rows = sg.stress(siglip, data, suites="occlusion")
    assert len(rows)
