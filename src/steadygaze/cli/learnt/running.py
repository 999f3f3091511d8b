"""What the commands that train an explanation method share: their options, progress, messages and exit codes.

Torch is imported inside the functions.

Exit codes: 0, success; 1, training failed or was too short, or images could not be read; 2, invalid input;
3, the file could not be written; 130, interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.training.learnt.run import LearntResult, LearntRun

LISTED = 20  # unreadable images that are listed at the end

Model = Annotated[
    str,
    typer.Option(
        help="timm name, torchvision:NAME, transformers folder or owner/name, run folder, or 'embedded'."
    ),
]
Data = Annotated[
    list[Path],
    typer.Option(help="Folder of images, at any depth; labels are not needed. May be repeated."),
]
Out = Annotated[Path, typer.Option(help="Output file, .safetensors. Repeat the command to resume.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Local weights of the model.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps. Default: see --epochs.")]
Epochs = Annotated[int, typer.Option(min=1, help="Number of passes over the images.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Random seed. Default: 0.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between two saves.")]
NumClasses = Annotated[int | None, typer.Option(help="Number of classes, if not that of the checkpoint.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]


def run_training(
    make_run: Callable[[], LearntRun], print_result: Callable[[LearntResult, Console], None], start: str = ""
) -> int:
    """Train with a progress bar and print the result; returns the exit code.

    start: what a run that is not resumed starts from, for the first line
    """
    from rich.console import Console

    from steadygaze.cli.running import print_line, progress_bar
    from steadygaze.cli.train import printed_log
    from steadygaze.errors import RowsNotWritten

    notes = Console(stderr=True)
    training = make_run()
    request = training.request
    steps = f"{training.total_steps} steps of {training.trainer.settings.batch}"
    begin = f", resumed after {training.resumed}" if training.resumed else start
    print_line(notes, f"{request.model}: {len(training.images.files)} images, {steps}{begin}")
    try:
        with progress_bar(notes) as on_progress, printed_log(notes):
            result = training.execute(on_progress)
    except RowsNotWritten as error:
        print_line(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        print_line(notes, f"interrupted; repeat the command to resume ({request.out})")
        return 130
    console = Console()
    print_result(result, console)
    return 1 if result.problem or result.unreadable else 0


def print_unreadable(result: LearntResult, console: Console) -> None:
    """The first unreadable images and why they were not used."""
    from steadygaze.cli.running import print_line

    for reason in result.unreadable[:LISTED]:
        print_line(console, f"not used: {reason}", "red")
