"""`optimizer.module_factor`: the learning rate of inserted modules as a multiple of the others'."""

import pytest
import torch

import steadygaze as sg
from helpers.training import content, recipe, same, weights
from steadygaze.training.recipe import make_recipe


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_modules_move_by_the_factor_and_nothing_else_does(layer_decay, data, tmp_path):
    plain = sg.train(recipe(data, epochs=1), tmp_path / "plain").folder
    rules = {"name": "momentum", "momentum": 0.0, "lr": 0.01, "layer_decay": layer_decay, "clip": 1e9}

    def trained(factor: float) -> dict[str, torch.Tensor]:
        changes = {
            "model": {"name": str(plain)},
            "modules": {"tap": {"branches": 2}, "cb": {"variant": "scaled"}},
            "optimizer": {**rules, "module_factor": factor},
            "schedule": {"name": "none"},
            "epochs": 1,
            "batch": 12,
        }
        got = sg.train(make_recipe(content(data, **changes)), tmp_path / str(factor))
        assert float(got.log[-1]["lr"]) == pytest.approx(0.01), "the recipe's, not the modules'"
        return weights(got.folder)

    once, five_times = trained(1.0), trained(5.0)
    moved = [name for name in once if not torch.equal(once[name], five_times[name])]
    assert moved and all(".tap." in name or ".cb_" in name for name in moved)
    gates = [name for name in once if name.endswith((".gate", "scale"))]
    for name in gates:  # they start at 0
        assert float(once[name].abs().max()) > 0
        torch.testing.assert_close(five_times[name], 5 * once[name])


def test_a_run_with_the_factor_resumes(data, tmp_path):
    asked = make_recipe(content(data, modules={"tap": {}}, optimizer={"lr": 0.01, "module_factor": 10.0}))
    sg.train(asked, tmp_path / "a")
    for stop in (3, None):
        sg.train(asked, tmp_path / "b", stop_after=stop)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_factor_of_nothing_is_an_error(data):
    with pytest.raises(sg.InputError, match=r"optimizer.module_factor: expected a number above 0, got -1"):
        make_recipe(content(data, optimizer={"module_factor": -1.0}))
