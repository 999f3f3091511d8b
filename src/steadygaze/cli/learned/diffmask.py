"""`steadygaze diffmask train`: gates that learn which patches a model does not need.

Exit codes: see `running`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadygaze.cli.learned import running
from steadygaze.cli.options import TRAINING, HelpfulCommand, TrustRemoteCode

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.training.diffmask import DiffMaskRequest
    from steadygaze.training.explainers import LearnedResult

diffmask = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Vision DiffMask: train the gates that --diffmask uses."
)


@diffmask.callback()
def top() -> None:
    """Vision DiffMask: train the gates that `--diffmask FILE` uses in `explain` and `verify`."""


@diffmask.command(cls=HelpfulCommand)
def train(
    model: running.Model,
    data: running.Data,
    out: running.Out,
    checkpoint: running.Checkpoint = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="cifar10 (default) or imagenet: the paper's values; reference: those of its code.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
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
            help="Number of images per step. Default: 16.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: running.Seed = None,
    gate_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Learning rate of the gates. Default: 2e-5.", rich_help_panel=TRAINING
        ),
    ] = None,
    baseline_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Learning rate of the vector that replaces masked patches. Default: 1e-3.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    dual_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Learning rate of λ, the weight of the divergence. Default: 0.3.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    dual_start: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="Initial λ. Default: 20.", rich_help_panel=TRAINING),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Steps until the full learning rates. Default: 1200.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Permitted change of the prediction (KL divergence). Default: 0.1.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    stretch: Annotated[
        float | None,
        typer.Option(metavar="X", help="α, the range of the gates. Default: 15.", rich_help_panel=TRAINING),
    ] = None,
    shift: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="β, the initial value of the gates. Default: 8.", rich_help_panel=TRAINING
        ),
    ] = None,
    dual: Annotated[
        str | None,
        typer.Option(
            help="Update of λ: ascent, or reference, with the sign of the authors' code.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    l0: Annotated[
        str | None,
        typer.Option(help="L0 term: norm, or log as in the authors' code.", rich_help_panel=TRAINING),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens that the L0 term counts: patches, or all, as in the authors' code.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Sampling of the last gate of a step: uniform or weighted.", rich_help_panel=TRAINING
        ),
    ] = None,
    slow: Annotated[
        str | None,
        typer.Option(
            help="Initial slow weights of Lookahead: start, or first_sync as in the authors' code.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    kl: Annotated[
        str | None,
        typer.Option(
            help="Divergence over all classes (all), or of one class (class).", rich_help_panel=TRAINING
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            help="Initial gates: drawn (random weights), or open (all patches are kept).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="With --kl class: the class, by index or name. Default: the predicted one.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Initial gates: a file trained for a model of the same widths.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Number of new attempts if the masks become all on or all off.",
            rich_help_panel=TRAINING,
        ),
    ] = 0,
    restart_with: Annotated[
        str,
        typer.Option(
            metavar="CHANGE",
            help="Change for a new attempt: seed (the next one), or stretch (also α + 5).",
            rich_help_panel=TRAINING,
        ),
    ] = "seed",
    save_every: running.SaveEvery = 200,
    num_classes: running.NumClasses = None,
    device: running.Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Learn which patches the model needs for its prediction; the model itself is not changed.

    Example: steadygaze diffmask train -m deit_tiny_patch16_224 -d photos -o diffmask.safetensors
    Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 -M diffmask --diffmask diffmask.safetensors
    """
    from steadygaze.training.diffmask import DiffMaskRequest

    options = {
        "batch": batch_size,
        "seed": seed,
        "gate_rate": gate_rate,
        "baseline_rate": baseline_rate,
        "dual_rate": dual_rate,
        "dual_start": dual_start,
        "warmup": warmup,
        "margin": margin,
        "stretch": stretch,
        "shift": shift,
        "dual": dual,
        "l0": l0,
        "tokens": tokens,
        "layers": layers,
        "slow": slow,
        "begin": begin,
        "kl": kl or ("class" if target is not None else None),
    }
    request = DiffMaskRequest(
        model=model,
        data=data,
        out=out,
        checkpoint=checkpoint,
        presets=tuple(word.strip() for text in preset or () for word in text.split(",") if word.strip()),
        options=options,
        target=target,
        steps=steps,
        epochs=epochs,
        warm_start=warm_start,
        restarts=restarts,
        restart_with=restart_with,
        save_every=save_every,
        num_classes=num_classes,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    raise typer.Exit(run(request))


def run(request: DiffMaskRequest) -> int:
    """Train the gates; returns the exit code."""
    from steadygaze.training.diffmask import DiffMaskRun

    return running.run_training(
        lambda: DiffMaskRun(request),
        lambda result, console: print_result(request, result, console),
        f", starting from {request.warm_start}" if request.warm_start else "",
    )


def print_result(request: DiffMaskRequest, result: LearnedResult, console: Console) -> None:
    """Print how training ended."""
    from steadygaze.cli.output import print_line

    report, initial = result.report, result.initial
    text = (
        f"{request.out}: {result.steps} steps; "
        f"all gates together keep {100 * report.l0:.1f} % of the patches, "
        f"KL {report.kl:.3f}, same prediction for {100 * report.accuracy:.1f} %"
    )
    if initial is not None:
        text += (
            f" (before training: {100 * initial.l0:.1f} %, {initial.kl:.3f}, {100 * initial.accuracy:.1f} %)"
        )
    print_line(console, text)
    running.print_unreadable(result, console)
    if result.too_early:
        advice = "Continue with more --steps, or start again with a higher --gate-rate"
        print_line(console, f"not trained yet: {result.problem}, as at the start. {advice}", "red")
    elif result.problem:
        advice = "Try --restarts 3, --restart-with stretch, another --seed or other rates (with a new --out)"
        print_line(console, f"diverged: {result.problem}. {advice}", "red")
