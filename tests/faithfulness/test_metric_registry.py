"""A metric and a method from outside the package, in a few lines each, work like those of the package."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from steadygaze.cli import app
from steadygaze.faithfulness import METRICS, evaluate
from steadygaze.faithfulness.inputs import Batch
from steadygaze.methods.registry import METHODS
from steadygaze.report.pages import write_report
from steadygaze.runs import verify as request
from steadygaze.runs.rows import Rows

RUN = ("--model", "embedded", "--batch-size", "4", "--limit", "8")


@pytest.fixture
def gini():
    @sg.register_metric("gini", unit="%", better="higher", low=0, high=100, label="Gini coefficient, percent")
    def measure(given):
        "Gini coefficient of the absolute values of a map."
        values = given.maps.abs().flatten(2).sort(dim=2).values  # (M, B, patches)
        n = values.shape[2]
        weights = 2 * torch.arange(1, n + 1, device=values.device) - n - 1
        return 100 * (values * weights).sum(2) / (n * values.sum(2))

    yield measure
    METRICS.remove("gini")


@pytest.fixture
def center():
    @sg.register_method("center", kind="model", family="toys", gradient=False, class_specific=False)
    def explain(query, *, width: float = 4.0):
        "A Gaussian in the middle of the image, whatever the model sees."
        rows, columns = query.vit.grid
        y = torch.arange(rows, dtype=torch.float32)[:, None] - (rows - 1) / 2
        x = torch.arange(columns, dtype=torch.float32) - (columns - 1) / 2
        return torch.exp(-(x**2 + y**2) / width**2).expand(len(query.images), rows, columns)

    yield explain
    METHODS.remove("center")


def command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_a_metric_from_outside_is_listed_and_measured(gini):
    (info,) = [info for info in sg.list_metrics() if info.name == "gini"]
    assert (info.unit, info.better, info.low, info.high) == ("%", "higher", 0, 100)
    assert info.label == "Gini coefficient, percent" and info.summary.startswith("Gini coefficient")
    model = sg.load_model("embedded")
    data = [(torch.rand(3, 3, 32, 32), torch.tensor([3, 5, 1]))]
    rows = sg.verify(model, data, methods="gaze", metrics="gini")
    maps = sg.explain(model.model, data[0][0], target=data[0][1], method="gaze").scores.abs().flatten(1)
    for row, scores in zip(rows, maps, strict=True):
        differences = (scores[:, None] - scores).abs().sum()
        expected = 100 * differences / (2 * len(scores) * scores.sum())
        assert row["value"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_a_metric_from_outside_resumes_after_a_kill_and_is_reported(gini, tmp_path, monkeypatch):
    data = image_folder(tmp_path / "data")
    options = ("--methods", "gaze,ixg", "--metrics", "gini,insertion_aopc")
    words = (*RUN, "--data", str(data), *options, "--out")
    assert "gini ↑" in command("verify", *words, str(tmp_path / "whole"))
    real, calls = request.compute_rows, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    monkeypatch.setattr(request, "compute_rows", killed)
    child = os.fork()
    if child == 0:
        command("verify", *words, str(tmp_path / "cut"))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    command("verify", *words, str(tmp_path / "cut"))
    assert len(calls) == 1, "the first batch was computed again"
    rows = [
        sorted((tmp_path / name / "rows-00000.jsonl").read_text().splitlines()) for name in ("whole", "cut")
    ]
    assert rows[0] == rows[1]
    page = write_report([tmp_path / "cut"], repeats=50)[0].read_text()
    assert "Gini coefficient, percent" in page and "Gini coefficient of the absolute values" in page


@pytest.mark.full
def test_a_method_from_outside_is_explained_and_verified(center, tmp_path):
    model = sg.load_model("embedded")
    scores = sg.explain(model.model, torch.rand(2, 3, 32, 32), method="center:width=2").scores
    middle = scores[:, scores.shape[1] // 2, scores.shape[2] // 2]
    assert (middle > scores[:, 0, 0]).all() and "center" in [info.name for info in sg.list_methods()]
    data = image_folder(tmp_path / "data")
    words = (
        *RUN,
        "--data",
        str(data),
        "--methods",
        "center,center:width=2",
        "--no-random",
        "--out",
        str(tmp_path / "run"),
    )
    assert "center:width=2" in command("verify", *words)
    assert {row["method"] for row in Rows.read(tmp_path / "run")} == {"center", "center:width=2"}


def test_bad_metrics_are_refused(gini):
    with pytest.raises(sg.InputError, match="registered already"):
        sg.register_metric("gini")(gini)
    with pytest.raises(sg.InputError, match="without spaces"):
        sg.register_metric("my metric")(gini)
    sg.register_metric("wrong")(lambda given: given.maps.mean())
    try:
        vit = sg.adapt(sg.load_model("embedded").model)
        batch = Batch(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))
        with pytest.raises(
            sg.InputError, match=r"'wrong': expected one number for each map and image, \(1, 2\)"
        ):
            evaluate(vit, batch, torch.rand(1, 2, *vit.grid), ["wrong"])
    finally:
        METRICS.remove("wrong")


@pytest.mark.full
def test_listing_does_not_need_a_model():
    code = "import json, steadygaze as sg; print(json.dumps([m.family for m in sg.list_metrics()]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=True
    )
    families = json.loads(done.stdout)
    expected = ["removal", "value", "perturbation", "magnitude", "subsets", "localization", "sanity"]
    expected += ["stability", "concentration", "truth"]
    assert list(dict.fromkeys(families)) == expected
