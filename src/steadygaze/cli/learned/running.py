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

from steadygaze.cli import options
from steadygaze.cli.options import DATA, MODEL, OUTPUT, TRAINING

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.training.explainers import LearnedResult, LearnedRun

LISTED = 20  # unreadable images that are listed at the end

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="timm name, torchvision:NAME, transformers folder or owner/name, run folder, or 'embedded'.",
        rich_help_panel=MODEL,
    ),
]
Data = Annotated[
    list[Path],
    typer.Option(
        "--data",
        "-d",
        metavar="FOLDER",
        help="Folder of images, searched recursively; labels are not needed. May be repeated.",
        rich_help_panel=DATA,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Output file, .safetensors. Repeat the command to resume.",
        rich_help_panel=OUTPUT,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", "-c", metavar="FILE", help="Local weights of the model.", rich_help_panel=MODEL
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of training steps. Default: determined by --epochs.",
        rich_help_panel=TRAINING,
    ),
]
Epochs = Annotated[
    int, typer.Option(metavar="N", min=1, help="Number of passes over the images.", rich_help_panel=TRAINING)
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Random seed. Default: 0.", rich_help_panel=TRAINING)
]
SaveEvery = Annotated[
    int, typer.Option(metavar="N", min=1, help="Number of steps between saves.", rich_help_panel=TRAINING)
]
NumClasses = options.NumClasses
Device = options.Device


def run_training(
    make_run: Callable[[], LearnedRun],
    print_result: Callable[[LearnedResult, Console], None],
    start: str = "",
) -> int:
    """Train with a progress bar and print the result; returns the exit code.

    start: what a run that is not resumed starts from, for the first line
    """
    from rich.console import Console

    from steadygaze.cli.output import print_line, progress_bar
    from steadygaze.cli.train import printed_log
    from steadygaze.errors import RowsNotWrittenError

    notes = Console(stderr=True)
    training = make_run()
    request = training.request
    steps = f"{training.total_steps} steps of {training.trainer.settings.batch}"
    begin = f", resumed after {training.resumed}" if training.resumed else start
    print_line(notes, f"{request.model}: {len(training.images.files)} images, {steps}{begin}")
    try:
        with progress_bar(notes) as on_progress, printed_log(notes):
            result = training.execute(on_progress)
    except RowsNotWrittenError as error:
        print_line(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        print_line(notes, f"interrupted; repeat the command to resume ({request.out})")
        return 130
    console = Console()
    print_result(result, console)
    return 1 if result.problem or result.unreadable else 0


def print_unreadable(result: LearnedResult, console: Console) -> None:
    """The first unreadable images and why they were not used."""
    from steadygaze.cli.output import print_line

    for reason in result.unreadable[:LISTED]:
        print_line(console, f"not used: {reason}", "red")
