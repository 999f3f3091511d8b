"""How the modules of a recipe begin: as the identity in trained weights, as in their papers in new ones."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import steadygaze as sg
from helpers.training import MODEL, SIDE, content, recipe, same, weights
from steadygaze.modules import inserted
from steadygaze.training.model import build_recipe_model
from steadygaze.training.recipe import make_recipe

BOTH: dict[str, Any] = {"tap": {"branches": 3}, "cb": {}}


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sg.train(recipe(data, epochs=1), tmp_path_factory.mktemp("plain")).folder


def models(plain: Path) -> dict[str, dict[str, Any]]:
    file = {"name": "vit_tiny_patch16_224", "checkpoint": str(plain / "model.safetensors")}
    return {
        "folder": {"name": str(plain)},
        "file": file,
        "file, new head": {**file, "arguments": MODEL, "new_head": True},
    }


@pytest.mark.parametrize("by", ["folder", "file", "file, new head"])
def test_trained_weights_are_not_harmed(by, data, plain, tmp_path, caplog):
    asked = make_recipe(content(data, epochs=1, model=models(plain)[by], modules=BOTH))
    images = torch.randn(2, 3, SIDE, SIDE)
    with caplog.at_level(logging.INFO, "steadygaze"):
        model = build_recipe_model(asked).model.eval()
    features = [m.forward_features(images) for m in (model, sg.load_model(str(plain)).model)]
    assert torch.equal(*features) and {m.spec["start"] for m in inserted(model).values()} == {"identity"}
    reason = "start = 'identity': the model starts from trained weights"
    assert f"modules.tap.{reason}" in caplog.text and f"modules.cb.{reason}" in caplog.text
    sg.train(asked, tmp_path / "a")
    for stop in (2, None):
        sg.train(asked, tmp_path / "b", stop_after=stop)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")), "resumed"
    assert json.loads((tmp_path / "a/train.json").read_text())["module_start"] == "identity"
    loaded = inserted(sg.load_model(str(tmp_path / "a")).model)
    assert all(float(m.gate.detach().abs()) > 0 for m in loaded.values()), "they have learned"
    again = content(data, epochs=1, model={"name": str(tmp_path / "a")}, modules=BOTH)
    kept = build_recipe_model(make_recipe(again)).model
    assert same(kept.state_dict(), weights(tmp_path / "a")), "the weights bring their modules"


def test_new_weights_begin_as_in_the_papers(data, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "steadygaze"):
        got = sg.train(recipe(data, epochs=1, modules=BOTH), tmp_path)
    assert all(m.gate is None for m in inserted(got.model).values())
    assert "modules.tap.start = 'paper': the model starts from new weights" in caplog.text
    assert json.loads((tmp_path / "train.json").read_text())["module_start"] == "paper"


def test_the_recipe_may_set_it(data, plain, caplog):
    def starts(model: dict[str, Any], modules: dict[str, Any]) -> set[str]:
        built = build_recipe_model(make_recipe(content(data, model=model, modules=modules)))
        found = {m.spec.get("start", "paper") for m in inserted(built.model).values()}
        assert {table["start"] for table in built.description["modules"].values() if table} == found
        return found

    assert starts({"name": str(plain)}, {"tap": {"start": "paper"}}) == {"paper"}
    new = {"name": "vit_tiny_patch16_224", "arguments": MODEL}
    with caplog.at_level(logging.INFO, "steadygaze"):
        assert starts(new, {"tap": {"start": "identity"}}) == {"identity"}
    assert "modules.tap.start = 'identity': set by the recipe" in caplog.text
    assert starts({"name": str(plain)}, {"cb": {"variant": "scaled", "init": 0.1}}) == {"paper"}
    with pytest.raises(sg.UnknownNameError, match="identity"):
        starts(new, {"tap": {"start": "identical"}})


def test_modules_of_another_start_are_refused(data, tmp_path):
    before = sg.train(recipe(data, epochs=1, modules={"tap": {}}), tmp_path / "before").folder
    asked = content(data, model={"name": str(before)}, modules={"tap": {"start": "identity"}})
    with pytest.raises(sg.InputError, match=r"modules.tap: the weights contain it already.*start='identity'"):
        build_recipe_model(make_recipe(asked))
