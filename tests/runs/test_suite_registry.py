"""A suite from outside the package: through Python and the command line, resumed after a kill, in the
report."""

import os
import signal
import time

import numpy as np
import pytest

import steadygaze as sg
from helpers.runs import cli, image_folder, rows_of
from steadygaze.report.pages import write_report
from steadygaze.runs.request import StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.settings import Bar, BarChart, Condition, Setting
from steadygaze.runs.stress import run_stress
from steadygaze.runs.suite import SUITES, Option, Suite


class Mirror(Suite):
    title = "Mirrored images"
    summary = "Images flipped from left to right, or upside down."
    options = (Option("axes", lambda text: tuple(str(text).split(",")), ("x",), "x, y or x,y"),)

    def conditions(self, evaluator):
        for axis in self.values["axes"]:
            yield Condition(self.name, (Setting(self.name, "mirror", axis),), evaluator.predictions)

    def make(self, image, condition):
        return np.flip(image.pixels(), axis=1 if condition.setting.level == "x" else 0)[None]

    def figures(self, card):
        numbers = [card.numbers[s.label, "top1"] for s in card.measured_settings(self.name, "top1")]
        bars = [Bar(n.setting.label, 100 * n.value, 100 * n.low, 100 * n.high) for n in numbers]
        if bars:
            yield BarChart("Accuracy in the mirror", bars, "accuracy, %")


@pytest.fixture
def toy():
    sg.register_suite("toy")(Mirror)
    yield
    SUITES.remove("toy")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("toy") / "data")


def test_in_python_and_in_the_report(toy, data, tmp_path):
    rows = sg.stress("embedded", data, suites=["toy"], axes="x,y", limit=4, out=tmp_path / "run")
    assert {row["setting"] for row in rows} == {"clean", "mirror/x", "mirror/y"}
    assert any(info.name == "toy" and info.options == {"axes": "x, y or x,y"} for info in sg.list_suites())
    page = write_report([tmp_path / "run"], repeats=20)[0].read_text()
    assert "Mirrored images" in page and "Accuracy in the mirror" in page and "mirror/y" in page


def test_on_the_command_line(toy, data, tmp_path):
    words = [
        "--model",
        "embedded",
        "--data",
        data,
        "--limit",
        3,
        "--num-workers",
        0,
        "--out",
        tmp_path / "run",
    ]
    assert "mirror/y" in cli(*words, "--suites", "toy", "--axes", "x,y")
    assert {row["setting"] for row in Rows.read(tmp_path / "run")} == {"clean", "mirror/x", "mirror/y"}
    assert "unknown option '--axis'" in cli(*words, "--suites", "toy", "--axis", "y", code=2)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_resumes_after_a_kill(toy, data, tmp_path):
    def request(name):
        return StressRequest(
            model="embedded",
            data=data,
            out=tmp_path / name,
            suites="toy",
            limit=8,
            batch_size=2,
            num_workers=0,
        )

    run_stress(request("whole"))
    child = os.fork()
    if child == 0:
        try:
            run_stress(request("killed"), on_progress=lambda progress: time.sleep(0.2))
        finally:
            os._exit(0)
    while not list((tmp_path / "killed").glob("rows-*.jsonl")) or not rows_of(tmp_path / "killed"):
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(rows_of(tmp_path / "killed")) < len(rows_of(tmp_path / "whole"))
    run_stress(request("killed"))
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


def test_a_name_is_registered_once(toy):
    with pytest.raises(sg.InputError, match="registered already"):
        sg.register_suite("toy")(Mirror)


def test_suites_come_in_the_order_of_runs_and_tables():
    names = [info.name for info in sg.list_suites()]
    assert names[:5] == ["corruptions", "sequences", "attacks", "autoattack", "patchfool"]
