"""`steadygaze train`: from a recipe to weights, log and curves.

Exit codes: 0, success; 1, success without the images that could not be read; 2, invalid input; 3, the run
could not continue (a loss that is not finite, a full disk); 130, interrupted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from steadygaze.cli.output import Column, print_line, print_table, progress_bar, wide
from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.progress import OnProgress
from steadygaze.training.loop import train
from steadygaze.training.recipe import Recipe, parse_value, read_recipe, recipe_text, shipped_recipes
from steadygaze.training.run_files import TrainingStoppedError

LISTED = 20  # unreadable images that are listed at the end


def run(
    recipe: str,
    out: Path,
    settings: list[str],
    device: str,
    command: str,
    *,
    trust_remote_code: bool = False,
) -> int:
    """Train; returns the exit code."""
    is_main = os.environ.get("RANK", "0") == "0"
    chosen = _chosen(recipe, parse_settings(settings) | {"command": command})
    with supervised(out, visible=is_main) as on_progress:
        result = train(
            chosen, out, on_progress=on_progress, device=device, trust_remote_code=trust_remote_code
        )
    if is_main:
        console = wide(Console())
        for title, score in (("top-1 accuracy", result.top1), ("mIoU", result.miou)):
            if score is not None:
                print_line(console, f"{title} on the test images: {100 * score:.2f} %", "bold")
        text = "wrote" if result.steps else "the run had finished before; its weights are"
        print_line(console, f"{text} {result.weights}")
        print_list(console, "skipped, unreadable", result.unreadable)
    return 1 if result.unreadable else 0


@contextmanager
def supervised(out: Path, *, visible: bool = True) -> Iterator[OnProgress]:
    """Show progress and log; exit with code 3 if the run cannot continue, 130 if it is interrupted."""
    notes = Console(stderr=True)
    try:
        with progress_bar(notes, visible=visible) as on_progress, printed_log(notes, visible=visible):
            yield on_progress
    except (TrainingStoppedError, RowsNotWrittenError) as error:
        print_line(notes, f"error: {error}", "red")
        raise typer.Exit(3) from error
    except KeyboardInterrupt:
        if visible:
            print_line(notes, f"interrupted; repeat the command to resume ({out})")
        raise typer.Exit(130) from None


def estimate(
    recipe: str,
    out: Path,
    settings: list[str],
    device: str,
    shards: Sequence[int],
    as_json: bool,
    *,
    trust_remote_code: bool = False,
) -> int:
    """Print what the training will cost; returns the exit code."""
    from steadygaze.cli.dry_run import dry_run
    from steadygaze.runs.estimate import estimate_train

    chosen = _chosen(recipe, parse_settings(settings))
    options: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    return dry_run(
        lambda n, report: estimate_train(chosen, out, shards=n, on_progress=report, **options),
        shards,
        as_json,
    )


def _chosen(recipe: str, changes: dict[str, Any]) -> Recipe:
    chosen = read_recipe(recipe, changes)
    if not chosen.data.train:
        raise InputError("data.train: expected a folder of images. Add --set data.train=FOLDER.")
    return chosen


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print the first lines, each after the title, and how many more there are."""
    for line in lines[:LISTED]:
        print_line(console, f"{title}: {line}", "red")
    if len(lines) > LISTED:
        print_line(console, f"... and {len(lines) - LISTED} more", "red")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Changes of a recipe from key=value. Values are TOML; a word without quotes is a string.

    Examples:
        >>> parse_settings(["seed=1", "data.train=some/folder", "optimizer.betas=[0.9, 0.95]"])
        {'seed': 1, 'data.train': 'some/folder', 'optimizer.betas': [0.9, 0.95]}
    """
    changes: dict[str, Any] = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"--set: expected KEY=VALUE, for example data.train=FOLDER, got {text!r}")
        changes[key.strip()] = parse_value(value)
    return changes


@contextmanager
def printed_log(console: Console, *, visible: bool = True) -> Iterator[None]:
    """Print what the package logs: notes about a run, and which blocks `modules.insert` changes."""
    logger, handler = logging.getLogger("steadygaze"), _ConsoleHandler(console)
    level = logger.level
    if visible:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        print_line(self.console, record.getMessage(), style)


def list_recipes() -> int:
    """Print the shipped recipes with their cost and measured results."""
    rows: list[tuple[list[str], str]] = []
    for name in shipped_recipes():
        recipe = read_recipe(name)
        facts = (("cost", recipe.cost), ("result", recipe.result))
        text = [recipe.about, *(f"{title}: {fact}" for title, fact in facts if fact), ""]
        rows.append(([name, "\n".join(text)], ""))
    columns = [Column("recipe", "name"), Column("description, cost, measured result", "text")]
    print_table(wide(Console()), columns, rows, title=f"{len(rows)} recipes")
    return 0


def show_recipe(name: str) -> int:
    """Print the text of a recipe, as a starting point for another one."""
    read_recipe(name)  # an error if it is not valid
    print(recipe_text(name), end="")
    return 0
