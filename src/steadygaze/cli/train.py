"""`steadygaze train`: a recipe in, weights, log and curves out.

Exit code: 0, all is well; 2, wrong input; 3, the run could not go on (a loss that is not finite, a full disk); 130, stopped by hand.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from steadygaze.cli.running import say, wide
from steadygaze.errors import BadInput
from steadygaze.training.loop import Report, train
from steadygaze.training.recipe_files import read_recipe, shipped
from steadygaze.training.run_files import TrainingStopped

EVERY = 15.0  # seconds between lines of progress where there is no terminal


def run(recipe: str, out: Path, settings: list[str], device: str, command: str) -> int:
    """Train; gives the exit code."""
    console, notes = wide(Console()), Console(stderr=True)
    main = os.environ.get("RANK", "0") == "0"
    asked = read_recipe(recipe, changes_of(settings) | {"command": command})
    try:
        with _progress(notes, main) as told, _told(notes, main):
            got = train(asked, out, told=told, device=device)
    except TrainingStopped as error:
        say(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        if main:
            say(notes, f"stopped; the same command goes on from the last checkpoint ({out})")
        return 130
    if main:
        if got.top1 is not None:
            say(console, f"top-1 on the test pictures: {100 * got.top1:.2f} %", "bold")
        if got.miou is not None:
            say(console, f"mIoU on the test pictures: {100 * got.miou:.2f} %", "bold")
        say(
            console,
            f"wrote {got.weights}"
            if got.steps
            else f"the run had ended before; its weights are {got.weights}",
        )
    return 0


def changes_of(settings: list[str]) -> dict[str, Any]:
    """From key=value to what a recipe would hold; values as in TOML, a word without quotes is a text.

    >>> changes_of(["seed=1", "data.train=some/folder", "optimiser.betas=[0.9, 0.95]", "ema.decay=0.99"])
    {'seed': 1, 'data.train': 'some/folder', 'optimiser.betas': [0.9, 0.95], 'ema.decay': 0.99}
    """
    import tomllib

    found: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"--set: expected key=value, for example data.train=FOLDER, got {text!r}")
        try:
            found[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value
    return found


@contextmanager
def _told(notes: Console, main: bool) -> Iterator[None]:
    """Say what is logged: notes; which blocks `modules.insert` changes, by how many parameters; how far the masks are that are found."""
    log, handler = logging.getLogger("steadygaze"), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        say(notes, record.getMessage(), "yellow" if record.levelno >= logging.WARNING else None)

    before, handler.emit = log.level, emit  # type: ignore[method-assign]
    if main:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _progress:
    """A bar with loss, its terms and the learning rate; plain lines now and then where nobody watches a terminal."""

    def __init__(self, notes: Console, main: bool) -> None:
        self.notes, self.main, self.last, self.bar = notes, main, 0.0, None
        self.task: Any = None

    def __enter__(self) -> Any:
        if self.main and self.notes.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, TextColumn("{task.fields[told]}"), console=self.notes)  # type: ignore[assignment]
            self.bar.start()  # type: ignore[attr-defined]
        return self.told

    def told(self, report: Report) -> None:
        if not self.main:
            return
        words = f"lr {report.lr:.3g}  " + "  ".join(
            f"{key} {value:.4g}" for key, value in report.values.items()
        )
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task("", total=report.steps, told="")
            self.bar.update(self.task, completed=report.step, told=words)
        elif (
            time.monotonic() - self.last > EVERY
            or report.step == report.steps
            or "test_loss" in report.values
        ):
            self.last = time.monotonic()
            say(
                self.notes,
                f"epoch {report.epoch}/{report.epochs}  step {report.step}/{report.steps}  {report.seconds:.0f} s  {words}",
            )

    def __exit__(self, *exc: Any) -> None:
        if self.bar is not None:
            self.bar.stop()


def list_recipes() -> int:
    """Every shipped recipe with what it does, its cost and its measured result."""
    table = Table("recipe", "what", "cost", "measured", box=SIMPLE)
    for name in shipped():
        recipe = read_recipe(name)
        table.add_row(name, recipe.about, recipe.cost, recipe.result)
    wide(Console()).print(table)
    return 0


def show_recipe(name: str) -> int:
    """The text of a recipe, to be copied and changed."""
    read_recipe(name)
    known = shipped()
    print(known[name] if name in known else Path(name).read_text(encoding="utf-8"), end="")
    return 0
