"""`steadygaze shapley train`: a network that predicts the Shapley values of patches.

Exit codes: see `running`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from steadygaze.cli.learned import running
from steadygaze.cli.options import TRAINING, HelpfulCommand, TrustRemoteCode

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.training.explainers import LearnedResult
    from steadygaze.training.vit_shapley import ShapleyRequest

shapley = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="ViT-Shapley: train the explainer that --shapley uses."
)


@shapley.callback()
def top() -> None:
    """ViT-Shapley: train the explainer that `--shapley FILE` uses in `explain` and `verify`."""


@shapley.command(cls=HelpfulCommand)
def train(
    model: running.Model,
    data: running.Data,
    out: running.Out,
    checkpoint: running.Checkpoint = None,
    steps: running.Steps = None,
    epochs: running.Epochs = 5,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            "--batch",
            "-b",
            min=1,
            metavar="N",
            help="Number of images per step. Default: 32.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Pairs of patch subsets for each image of a step. Default: 2.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    surrogate: Annotated[
        str | None,
        typer.Option(
            help="model (default): explain the model itself with removed patches; train: a copy that is "
            "fine-tuned on images with removed patches first, as in the paper.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    surrogate_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Steps of --surrogate train, before --steps. Default: 1000.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    trunk: Annotated[
        str | None,
        typer.Option(
            help="model (default): the explainer reads hidden states of the model itself; train: of a copy "
            "that is fine-tuned with it, as in the paper.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Learning rate of the explainer. Default: 1e-3.", rich_help_panel=TRAINING
        ),
    ] = None,
    trunk_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Learning rate of --trunk train. Default: 1e-4.", rich_help_panel=TRAINING
        ),
    ] = None,
    surrogate_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Learning rate of --surrogate train. Default: 1e-4.", rich_help_panel=TRAINING
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Steps until the full learning rates. Default: 200.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: running.Seed = None,
    save_every: running.SaveEvery = 200,
    num_classes: running.NumClasses = None,
    device: running.Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Learn to predict the Shapley values of an image's patches; the model itself is not changed.

    Example: steadygaze shapley train -m deit_tiny_patch16_224 -d photos -o shapley.safetensors
    Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 -M vit_shapley --shapley shapley.safetensors
    """
    from steadygaze.training.vit_shapley import ShapleyRequest

    options = {
        "batch": batch_size,
        "pairs": pairs,
        "surrogate": surrogate,
        "surrogate_steps": surrogate_steps,
        "trunk": trunk,
        "rate": rate,
        "trunk_rate": trunk_rate,
        "surrogate_rate": surrogate_rate,
        "warmup": warmup,
        "seed": seed,
    }
    request = ShapleyRequest(
        model=model,
        data=data,
        out=out,
        checkpoint=checkpoint,
        options=options,
        steps=steps,
        epochs=epochs,
        save_every=save_every,
        num_classes=num_classes,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    raise typer.Exit(run(request))


def run(request: ShapleyRequest) -> int:
    """Train the explainer; returns the exit code."""
    from steadygaze.training.vit_shapley import ShapleyRun

    return running.run_training(
        lambda: ShapleyRun(request), lambda result, console: print_result(request, result, console)
    )


def print_result(request: ShapleyRequest, result: LearnedResult, console: Console) -> None:
    """Print how training ended."""
    from steadygaze.cli.output import print_line

    report = result.report
    print_line(
        console,
        f"{request.out}: {result.steps} steps; loss {report.loss:.5f}, {100 * report.explained:.1f} % of the "
        "variation of the prediction over patch subsets explained "
        f"(equal shares: 0 %, loss {report.even:.5f})",
    )
    running.print_unreadable(result, console)
    if result.too_early:
        advice = "Continue with more --steps, or start again with another --rate"
        print_line(console, f"not trained yet: {result.problem}. {advice}", "red")
    elif result.problem:
        advice = "Try a lower --rate, with a new --out"
        print_line(console, f"diverged: {result.problem}. {advice}", "red")
