"""`steadygaze shapley train`, and `--shapley FILE` in explain and verify: exact resume, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.methods.vit_shapley import read_file
from steadygaze.training.explainers import ExplainerRequest, ExplainerRun
from steadygaze.training.vit_shapley import Trainer

WORDS = ("--model", "embedded", "--steps", "3", "--set", "batch=2", "--set", "pairs=1", "--set", "warmup=2")


def cli(*words, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.output.replace("\n", " ")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Five images of two classes."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for number in range(5):
        place = folder / ("cat", "ship")[number % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def loaded():
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def weights(data, loaded, tmp_path_factory) -> Path:
    """Trained until it explains more than equal shares."""
    out = tmp_path_factory.mktemp("weights") / "s.safetensors"
    options = {"batch": 5, "pairs": 4, "warmup": 5, "rate": 3e-3}
    request = ExplainerRequest("embedded", [data], out, options=options, steps=25)
    ended = ExplainerRun(Trainer, request, loaded).execute()
    assert ended.report.explained > 0 and not ended.problem
    return out


def run(data, out, loaded, steps: int = 6, **options) -> ExplainerRun:
    options = {"batch": 2, "pairs": 1, "warmup": 2, **options}
    request = ExplainerRequest("embedded", [data], out, options=options, steps=steps, save_every=2)
    return ExplainerRun(Trainer, request, loaded)


@pytest.mark.full
def test_resume_is_exact(data, tmp_path, loaded, monkeypatch) -> None:
    """Interrupted, and killed between two saves, in both stages: the file is that of an undisturbed run."""
    both = {"surrogate": "train", "surrogate_steps": 4}
    whole = tmp_path / "whole"
    run(data, whole, loaded, steps=3, **both).execute()
    real = Trainer.step
    for at, how, left in ((3, SystemExit, 2), (5, KeyboardInterrupt, 5)):
        out = tmp_path / f"cut{at}"

        def step(self, images, at=at, how=how):
            if self.steps == at:
                raise how
            return real(self, images)

        monkeypatch.setattr(Trainer, "step", step)
        with pytest.raises(how):
            run(data, out, loaded, steps=3, **both).execute()
        monkeypatch.setattr(Trainer, "step", real)
        again = run(data, out, loaded, steps=3, **both)
        assert again.resumed == left and again.total_steps == 7
        again.execute()
        assert out.read_bytes() == whole.read_bytes()
    done = []
    run(data, whole, loaded, steps=3, **both).execute(lambda p: done.append((p.done, p.resumed)))
    assert done == [(7, 7)], "nothing is left to do"
    run(data, whole, loaded, steps=4, **both).execute()
    assert read_file(whole)[1]["steps"] == 8, "more steps can be requested"
    message = r"holds an explainer of another training: pairs was 1, is now 3"
    with pytest.raises(sg.InputError, match=message):
        run(data, whole, loaded, steps=3, **both, pairs=3)


def test_command(data, tmp_path, loaded) -> None:
    out = tmp_path / "s.safetensors"
    told = cli("shapley", "train", *WORDS, "--data", data, "--out", out, code=1)
    assert "5 images, 3 steps of 2" in told and "s.safetensors: 3 steps; loss" in told
    assert "not trained yet: it explains no more than equal shares" in told or "not trained" not in told
    told = cli("shapley", "train", *WORDS, "--data", data, "--out", out, "--set", "rate=-1", code=2)
    assert "rate: expected a number above 0, got -1" in told
    told = cli("shapley", "train", *WORDS, "--data", data, "--out", out, "--set", "trunk=tree", code=2)
    assert "unknown trunk 'tree'" in told
    (tmp_path / "file").write_text("")
    cli("shapley", "train", *WORDS, "--data", data, "--out", tmp_path / "file" / "s", code=3)


def test_a_loss_that_is_not_finite_ends_training(data, tmp_path, loaded, monkeypatch) -> None:
    real = Trainer._explainer_loss

    def broken(self, *given):
        loss, report = real(self, *given)
        return (
            (loss * torch.nan, type(report)(float("nan"), report.even)) if self.steps == 2 else (loss, report)
        )

    monkeypatch.setattr(Trainer, "_explainer_loss", broken)
    trained = run(data, tmp_path / "s", loaded)
    ended = trained.execute()
    assert ended.problem == "the loss is not finite" and ended.steps == 3
    monkeypatch.undo()
    weights = read_file(tmp_path / "s")[0].state_dict().values()
    assert all(torch.isfinite(tensor).all() for tensor in weights), "nothing has moved in that step"
    with pytest.warns(UserWarning, match="is not trained: the loss is not finite"):
        method = sg.method("vit_shapley", file=str(tmp_path / "s"))
        sg.explain(loaded.model, torch.zeros(1, 3, 32, 32), method=method)


@pytest.mark.full
def test_explain_and_verify(data, tmp_path, weights, loaded) -> None:
    out = tmp_path / "out"
    cli("explain", data, "--model", "embedded", "--shapley", weights, "--method", "gaze", "--out", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert [m["name"] for m in manifest["methods"]] == ["gaze", "vit_shapley"]
    assert manifest["vit_shapley"] == "s.safetensors"
    scores = np.load(out / "scores.npz")
    file = sorted(data.rglob("*.png"))[0]
    image = loaded.preprocess(Image.open(file))[None]
    att = sg.explain(loaded, image, method=sg.method("vit_shapley", file=str(weights)))
    index = list(scores["names"]).index(next(n for n in scores["names"] if Path(n).stem == file.stem))
    assert np.allclose(scores["vit_shapley"][index], att.scores[0].numpy(), atol=1e-5)
    rows = tmp_path / "rows"
    words = ("verify", "--model", "embedded", "--data", data, "--out", rows, "--ratios", "0.5")
    told = cli(*words, "--methods", "rollout,vit_shapley", "--shapley", weights)
    assert "vit_shapley" in told and "rollout" in told
    about = json.loads((rows / "run.json").read_text())
    assert about["about"]["given"]["vit_shapley"] == str(weights)
    assert len(about["settings"]["vit_shapley"]) == 16
    told = cli(*words, "--methods", "vit_shapley", "--shapley", tmp_path / "none", code=2)
    assert "no such file" in told
