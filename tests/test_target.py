"""Multi-label and regression models: what is explained, and how predictions are put into words."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import steadygaze as sg
from benchmarks import zoo
from helpers.tiers import tiered
from helpers.tiny_models import served
from oracles.models import random_images, tiny
from steadygaze.methods.sufficient import subsets
from steadygaze.target import class_score, describe, predictions


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("class")


def of_transformers(problem: str | None, labels: int = 3) -> nn.Module:
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=labels,
        problem_type=problem,
    )
    return zoo.randomize(ViTForImageClassification(config))


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("logit", lambda y: y),
        ("log_odds", lambda y: y.sigmoid().log() - (1 - y.sigmoid()).log()),
        ("log_prob", F.logsigmoid),
        ("prob", torch.sigmoid),
    ],
)
def test_the_scores_of_a_label_are_those_of_its_sigmoid(score, expected) -> None:
    logits = torch.tensor([[1.5, -0.5, 7.0], [0.2, -3.0, 7.0]], dtype=torch.float64)
    target = torch.tensor([0, 1])
    got = class_score(score, logits, target, "labels")
    torch.testing.assert_close(got, expected(torch.tensor([1.5, -3.0], dtype=torch.float64)))


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_other_outputs_do_not_change_what_is_explained(model: nn.Module, task: str) -> None:
    """The odds of a label, and a value, are the output itself."""
    images = random_images(model)
    vit = sg.adapt(model, task=task)
    methods = ["gaze", "gae", "decompx+skipplus", "ixg+plus"]
    found = sg.explain(vit, images, target=1, method=methods)
    itself = sg.explain(model, images, target=lambda y: y[:, 1], method=methods)
    for name in methods:
        torch.testing.assert_close(found[name].scores, itself[name].scores)
    assert not torch.allclose(found["gaze"].scores, sg.explain(model, images, 1, "gaze").scores)


@pytest.mark.parametrize("task", tiered(["multilabel", "regression"], ["multilabel"]))
def test_every_method_explains_labels_and_values(model: nn.Module, task: str) -> None:
    vit, images = sg.adapt(model, task=task), random_images(model)
    names = [name for name in served(model) if not (task == "regression" and name == "sufficient")]
    budget = {"rise": 20, "hsic": 20, "kernelshap": 60}
    methods = [sg.method(name, budget=budget[name]) if name in budget else name for name in names]
    for attribution in sg.explain(vit, images, target=2, method=methods).values():
        assert torch.isfinite(attribution.scores).all()
        assert attribution.score == ("value" if task == "regression" else attribution.score)


def test_the_most_probable_label_is_the_default(model: nn.Module) -> None:
    images = random_images(model)
    found = sg.explain(sg.adapt(model, task="multilabel"), images)
    assert torch.equal(found.target, model(images).sigmoid().argmax(1))
    assert found.probability() == pytest.approx(model(images)[0].sigmoid().max().item())


def test_a_regression_model_of_several_values_needs_a_target(model: nn.Module) -> None:
    with pytest.raises(sg.InputError, match=r"gives \d values .* Give the index of the value to explain"):
        sg.explain(sg.adapt(model, task="regression"), random_images(model))


@pytest.mark.parametrize(
    ("task", "score", "message"),
    [
        ("multilabel", "contrast", "independent"),
        ("regression", "prob", "no probability"),
        ("regression", "log_odds", "no probability"),
        ("classification", "value", "value"),
    ],
)
def test_scores_that_the_outputs_lack_are_refused(model: nn.Module, task, score, message) -> None:
    with pytest.raises(sg.SteadygazeError, match=message):
        sg.explain(sg.adapt(model, task=task), random_images(model), 0, score=score)


def test_values_have_no_sufficient_subset(model: nn.Module) -> None:
    vit, images = sg.adapt(model, task="regression"), random_images(model)
    with pytest.raises(sg.MethodUnavailableError, match="no confidence"):
        sg.explain(vit, images, 0, method="sufficient")
    with pytest.raises(sg.MethodUnavailableError, match="no confidence"):
        subsets(vit, images, 0)


def test_sufficient_subsets_of_a_label_use_its_own_probability(model: nn.Module) -> None:
    images = random_images(model)
    found = subsets(sg.adapt(model, task="multilabel"), images, 1)
    torch.testing.assert_close(found.confidence[:, 0], model(images)[:, 1].sigmoid().detach())


@pytest.mark.parametrize(
    ("problem", "outputs"),
    [
        ("multi_label_classification", "labels"),
        ("regression", "values"),
        ("single_label_classification", "classes"),
        (None, "classes"),
    ],
)
def test_transformers_state_their_problem_type(problem: str | None, outputs: str) -> None:
    module = of_transformers(problem)
    assert sg.adapt(module).plan.outputs == outputs
    preprocess = sg.load_model("embedded").preprocess
    loaded = sg.load_model(module, preprocess=preprocess)
    assert sg.adapt(loaded).plan.outputs == outputs
    other = sg.load_model(module, preprocess=preprocess, task="classification")
    assert sg.adapt(other).plan.outputs == "classes" and other.task == "classification"


def test_a_task_belongs_to_a_view_and_not_to_the_model(model: nn.Module) -> None:
    labels = sg.adapt(model, task="multilabel")
    assert sg.adapt(model).plan.outputs == "classes"
    assert sg.adapt(labels) is labels and sg.adapt(labels, task="regression").plan.outputs == "values"
    assert copy.deepcopy(labels).plan.outputs == "labels"
    assert pickle.loads(pickle.dumps(labels)).plan.outputs == "labels"
    with pytest.raises(sg.UnknownNameError, match="multilabel"):
        sg.adapt(model, task="multi-label")


def test_predictions_of_one_logit_stay_binary() -> None:
    y = torch.tensor([[0.3]])
    assert torch.equal(predictions("classes", y), y.sigmoid())
    assert torch.equal(predictions("values", y), y)


def test_predictions_in_words() -> None:
    assert describe("classes", 1, 0.62, ["dog", "tabby cat"]) == "tabby cat 62 %"
    assert describe("labels", 0, 0.932, ["cat"]) == "cat 0.93"
    assert describe("labels", 3, 0.932) == "label 3: 0.93"
    assert describe("values", 0, 37.2, ["age"]) == "age 37.2"
    assert describe("values", 2, -0.5) == "value 2: -0.5"


def saved(attribution: sg.Attribution, folder) -> dict:
    attribution.save(folder)
    return json.loads((folder / "manifest.json").read_text())


def test_titles_and_manifests_name_labels_and_values(model: nn.Module, tmp_path) -> None:
    images = random_images(model)
    logits: Tensor = model(images)
    labels = sg.explain(sg.adapt(model, task="multilabel"), images, 1)
    assert labels.title() == f"label 1: {float(logits[0, 1].sigmoid()):.2f}"
    manifest = saved(labels, tmp_path / "labels")
    assert manifest["task"] == "multilabel"
    assert manifest["images"][0]["targets"][0]["label"] == 1
    values = sg.explain(sg.adapt(model, task="regression"), images, 1)
    assert values.title() == f"value 1: {float(logits[0, 1]):.4g}" and values.probability() is None
    manifest = saved(values, tmp_path / "values")
    assert manifest["methods"][0]["score"] == "value"
    entry = manifest["images"][0]["targets"][0]
    assert entry == {"output": 1, "name": None, "value": round(float(logits[0, 1]), 6)}
