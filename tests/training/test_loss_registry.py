"""A loss from outside the package: registered, listed, used by recipes in Python and on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steadygaze as sg
from helpers.training import MODEL, content, same, weights
from steadygaze.training.losses import LOSSES, Loss, LossBatch, LossOptions
from steadygaze.training.recipe import make_recipe

PLUGIN = '''
from torch import Tensor

import steadygaze as sg
from steadygaze.training.losses import Loss, LossBatch, LossOptions


class LogitNormOptions(LossOptions):
    target: float = 0.0


@sg.register_loss("logit_norm", options=LogitNormOptions)
class LogitNorm(Loss):
    """Mean squared distance of the logits from `target`."""

    options: LogitNormOptions

    def __call__(self, batch: LossBatch) -> Tensor:
        return (batch.logits - self.options.target).square().mean()
'''


class SpreadOptions(LossOptions):
    inside: float = 0.5

    @property
    def term_weights(self):
        return {"within": self.inside}


class Spread(Loss):
    """Two terms, with a weight inside and masks needed."""

    terms = ("within", "between")
    needs_masks = True
    tasks = ("classification",)
    options: SpreadOptions

    def __call__(self, batch: LossBatch) -> dict[str, torch.Tensor]:
        assert batch.masks is not None
        return {"within": batch.logits.square().mean(), "between": batch.logits.mean().square()}


@pytest.fixture
def logit_norm():
    exec(PLUGIN, {})
    yield
    LOSSES.remove("logit_norm")


def test_it_is_listed(logit_norm):
    infos = {info.name: info for info in sg.list_losses()}
    ours = [
        "cross_entropy",
        "relevance",
        "cft",
        "gradmask",
        "rrr",
        "distillation",
        "adl",
        "patch_augmentation",
    ]
    assert [*infos] == [*ours, "logit_norm"]
    info = infos["logit_norm"]
    assert info.summary == "Mean squared distance of the logits from `target`."
    assert info.options == {"weight": 1.0, "target": 0.0} and not info.needs_masks and info.terms == ()
    assert infos["relevance"].needs_masks and infos["relevance"].terms[0] == "background"


def test_it_trains_through_python_and_resumes(logit_norm, data, tmp_path):
    losses = {"cross_entropy": {}, "logit_norm": {"weight": 0.5, "target": 1.0}}
    recipe = make_recipe(content(data, losses=losses))
    result = sg.train(recipe, tmp_path / "run")
    for row in result.log:
        total = float(row["cross_entropy"]) + 0.5 * float(row["logit_norm"])
        assert float(row["loss"]) == pytest.approx(total, rel=1e-5)
    plain = sg.train(make_recipe(content(data)), tmp_path / "plain")
    assert not same(result.model.state_dict(), plain.model.state_dict())
    sg.train(recipe, tmp_path / "resumed", stop_after=2)
    sg.train(recipe, tmp_path / "resumed")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "resumed"))
    with pytest.raises(sg.InputError, match=r"losses.logit_norm.target was 1.0, is now 2.0"):
        sg.train(recipe, tmp_path / "run", changes={"losses.logit_norm.target": 2.0})


def test_its_options_are_checked(logit_norm, data):
    with pytest.raises(sg.UnknownNameError, match=r"unknown key 'losses.logit_norm.targt'. Did you mean"):
        make_recipe(content(data, losses={"logit_norm": {"targt": 1.0}}))
    with pytest.raises(sg.InputError, match=r"losses.logit_norm.target: expected a number, got 'high'"):
        make_recipe(content(data, losses={"logit_norm": {"target": "high"}}))
    with pytest.raises(sg.UnknownNameError, match=r"unknown loss 'logit_nrm'. Did you mean 'logit_norm'"):
        make_recipe(content(data, losses={"logit_nrm": {}}))


def test_what_it_needs_is_respected(data):
    sg.register_loss("spread", options=SpreadOptions)(Spread)
    try:
        with pytest.raises(sg.InputError, match=r"losses.spread: expected masks"):
            make_recipe(content(data, losses={"spread": {}}))
        with pytest.raises(sg.InputError, match=r"losses.spread: it is defined for classifiers"):
            make_recipe(content(data, losses={"spread": {}}, task="segmentation"))
        with pytest.raises(sg.InputError, match="registered already"):
            sg.register_loss("spread", options=SpreadOptions)(Spread)
    finally:
        LOSSES.remove("spread")
    with pytest.raises(sg.InputError, match="expected a subclass of Loss, got"):
        sg.register_loss("no_loss")(dict)


@pytest.mark.full
def test_the_command_finds_it_as_a_plugin(data, tmp_path):
    """An installed package brings it by the entry point group `steadygaze.plugins`."""
    (tmp_path / "logit_norm_plugin.py").write_text(PLUGIN)
    info = tmp_path / "logit_norm_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: logit-norm-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[steadygaze.plugins]\nlogit_norm = logit_norm_plugin\n")
    arguments = ", ".join(f"{key} = {value}" for key, value in MODEL.items())
    (tmp_path / "recipe.toml").write_text(
        "epochs = 1\nbatch = 4\nlog_every = 1\ntensorboard = false\n"
        f'[model]\nname = "vit_tiny_patch16_224"\narguments = {{ {arguments} }}\n'
        '[augment]\ncrop = "pad"\n[losses.cross_entropy]\n[losses.logit_norm]\nweight = 0.5\n'
    )
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    words = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--set"]
    command = [sys.executable, "-m", "steadygaze", *words, f"data.train={data}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    header, *rows = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert "logit_norm" in header.split(",") and len(rows) == 3
