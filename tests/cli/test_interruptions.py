"""Ctrl-C in `steadygaze explain`, pressed on a real process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import steadygaze
from steadygaze.cli.output import Interruptions

DEMO = Path(steadygaze.__file__).parent / "assets" / "demo"
METHODS = "lime:budget=40000,kernel_shap:budget=40000,gae"

# A process as the user starts it, that also prints a line when a search has done some of its runs.
PROGRAM = """
import signal
import sys
import steadygaze.cli.explain as command
from steadygaze.cli import output
from contextlib import contextmanager
from steadygaze.cli import main

@contextmanager
def progress_bar(console, *, visible=True):
    seen = set()
    def on_progress(progress):
        if progress.unit == "forward passes" and progress.task not in seen:
            seen.add(progress.task)
            print("running", progress.task, file=sys.stderr, flush=True)
    yield on_progress

command.progress_bar = progress_bar
output.SECONDS = float(sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
main()
"""


class Command:
    """The command in a process of its own; `wait_for` reads its output until a line matches."""

    def __init__(self, out: Path, seconds: float) -> None:
        words = ["explain", DEMO / "ship.png", "--model", "embedded", "--method", METHODS, "--out", out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(seconds), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.text = ""
        self.watchdog = threading.Timer(1800, self.process.kill)
        self.watchdog.start()

    def wait_for(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if re.search(pattern, line):
                return
        pytest.fail(f"no line with {pattern!r} in {self.text}")

    def press(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        assert self.process.stdout is not None
        self.text += self.process.stdout.read()
        code = self.process.wait()
        self.watchdog.cancel()
        return code


@pytest.fixture
def command(tmp_path, request):
    """The parameter is the time in which a second press ends everything."""
    started = Command(tmp_path / "out", request.param)
    yield started
    started.watchdog.cancel()
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize("command", [3600], indirect=True)
def test_a_second_press_ends_everything(command, tmp_path):
    command.wait_for("running lime")
    command.press()
    command.wait_for("lime: interrupted after")
    assert "Continuing with kernel_shap" in command.text and "Ctrl-C again" in command.text
    command.press()
    assert command.end() == 130, command.text
    assert "1 of 1 image not explained" in command.text and "Traceback" not in command.text
    assert not list((tmp_path / "out").glob("*.png"))


@pytest.mark.full
@pytest.mark.parametrize("command", [0.5], indirect=True)
def test_a_late_second_press_ends_the_next_search_only(command, tmp_path):
    command.wait_for("running lime")
    command.press()
    command.wait_for("running kernel_shap")
    time.sleep(1)
    command.press()
    assert command.end() == 0, command.text
    assert len(re.findall(r"(?m)^(lime|kernel_shap): interrupted after", command.text)) == 2
    written = {file.name.split(".")[1] for file in (tmp_path / "out").glob("ship.*.png")}
    assert {name.split("-")[0] for name in written} == {"lime", "kernel_shap", "gae"}


@pytest.mark.parametrize(
    ("message", "several", "expected"),
    [
        ("lime: interrupted after 1 of 2 runs", False, "rise"),
        ("rise: interrupted after 1 of 2 runs", False, ""),
        ("rise: interrupted after 1 of 2 runs", True, "the other classes"),
    ],
)
def test_what_follows_an_interrupted_search(message, several, expected):
    interruptions = Interruptions(None, ["gae", "lime", "rise"], several_classes=several)
    assert interruptions.following(message) == expected
