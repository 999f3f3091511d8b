"""The progress bar that all commands share, and what they print at the end."""

import io

import pytest
from rich.console import Console

from steadygaze.cli import output as running
from steadygaze.cli.output import LineDisplay, duration, progress_bar, progress_line
from steadygaze.progress import Progress


def lines_of(console_file: io.StringIO) -> list[str]:
    return console_file.getvalue().splitlines()


def test_lines_without_a_terminal_come_at_intervals(monkeypatch):
    clock = iter((0.0, 1.0, 10.0, 20.0, 21.0, 40.0))
    monkeypatch.setattr(running.time, "monotonic", lambda: next(clock))
    text = io.StringIO()
    display = LineDisplay(Console(file=text, width=200))  # at 0
    display(Progress("verify", 0, 4, "images"))  # at 1
    display(Progress("rise", 5, 10, "forward passes"))  # at 10
    display(Progress("rise", 6, 10, "forward passes"))  # at 20: printed
    display(Progress("rise", 10, 10, "forward passes"))  # at 21: a search inside ends without a line
    display(Progress("verify", 4, 4, "images", detail="last"))  # at 40
    assert lines_of(text) == ["rise: 6/10 forward passes, 7 s left", "verify: 4/4 images  last"]


def test_bars_on_a_terminal_show_each_running_task():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with progress_bar(console) as on_progress:
        assert isinstance(on_progress, running.BarDisplay)
        tasks = on_progress.bars.tasks
        on_progress(Progress("verify", 3, 10, "images", resumed=3))
        on_progress(Progress("rise", 4, 10, "forward passes", detail="[b]1/2[/b]"))
        described = {task.description: task for task in on_progress.bars.tasks}
        assert set(described) == {"verify", "rise"} and described["verify"].completed == 3
        assert not tasks and described["verify"].speed is None  # what was resumed is no part of the speed
        assert described["rise"].fields["detail"] == r"\[b]1/2\[/b]"
        on_progress(Progress("rise", 10, 10, "forward passes"))
        on_progress(Progress("verify", 4, 10, "images", resumed=3))
        assert [(task.description, task.completed) for task in on_progress.bars.tasks] == [("verify", 4)]


def test_other_processes_show_nothing():
    text = io.StringIO()
    with progress_bar(Console(file=text), visible=False) as on_progress:
        on_progress(Progress("verify", 4, 4, "images"))
    assert not text.getvalue()


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (Progress("stress", 0, 10, "images"), "stress: 0/10 images"),
        (Progress("stress", 4, None, "images"), "stress: 4/? images"),
        (Progress("stress", 5, 10, "images", resumed=5), "stress: 5/10 images (5 resumed)"),
        (Progress("train", 5, 10, "steps", detail="loss 0.3"), "train: 5/10 steps, 50 s left  loss 0.3"),
    ],
)
def test_one_line_of_progress(progress, expected):
    assert progress_line(progress, 50.0) == expected


def test_durations():
    assert [duration(s) for s in (0.4, 61, 3661)] == ["0 s", "1 min 01 s", "1 h 01 min"]
