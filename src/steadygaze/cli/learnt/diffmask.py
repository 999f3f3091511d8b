"""`steadygaze diffmask train`: gates that learn which patches a model does not need.

Exit codes: see `running`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadygaze.cli.commands.options import TrustRemoteCode
from steadygaze.cli.learnt import running

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.training.diffmask.loop import DiffMaskRequest
    from steadygaze.training.learnt.run import LearntResult

diffmask = typer.Typer(no_args_is_help=True, help="Vision DiffMask: train the gates that --diffmask uses.")


@diffmask.callback()
def top() -> None:
    """Vision DiffMask: train the gates that `--diffmask FILE` uses in `explain` and `verify`."""


@diffmask.command()
def train(
    model: running.Model,
    data: running.Data,
    out: running.Out,
    checkpoint: running.Checkpoint = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="cifar10 (default) or imagenet: the paper's values; reference: those of its code."),
    ] = None,
    steps: running.Steps = None,
    epochs: running.Epochs = 5,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "--batch", min=1, help="Images per step. Default: 16.")
    ] = None,
    seed: running.Seed = None,
    gate_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the gates. Default: 2e-5.")
    ] = None,
    baseline_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the vector in place of masked patches: 1e-3.")
    ] = None,
    dual_rate: Annotated[
        float | None, typer.Option(help="Learning rate of λ, the weight of the divergence. Default: 0.3.")
    ] = None,
    dual_start: Annotated[float | None, typer.Option(min=0, help="Initial λ. Default: 20.")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps until the full learning rates. Default: 1200.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="How far the prediction may change (KL). Default: 0.1.")
    ] = None,
    stretch: Annotated[float | None, typer.Option(help="α, the range of the gates. Default: 15.")] = None,
    shift: Annotated[
        float | None, typer.Option(help="β, the initial value of the gates. Default: 8.")
    ] = None,
    dual: Annotated[str | None, typer.Option(help="ascent, or reference: λ with the code's sign.")] = None,
    l0: Annotated[str | None, typer.Option(help="norm, or log as in the code.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="patches, or all: prefix tokens counted, as in the code.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="uniform or weighted: how the last gate of a step is drawn.")
    ] = None,
    slow: Annotated[
        str | None, typer.Option(help="start, or first_sync as in the code: Lookahead's slow weights.")
    ] = None,
    kl: Annotated[
        str | None, typer.Option(help="all: keep the whole distribution; class: keep one class.")
    ] = None,
    begin: Annotated[
        str | None, typer.Option(help="drawn: random initial weights; open: all patches kept at first.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="That class, by number or name. Default: the predicted one.")
    ] = None,
    warm_start: Annotated[Path | None, typer.Option(help="Start from a mask of the same widths.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Number of new attempts if the masks become all on or all off.")
    ] = 0,
    restart_with: Annotated[str, typer.Option(help="seed: the next one; stretch: also α + 5.")] = "seed",
    save_every: running.SaveEvery = 200,
    num_classes: running.NumClasses = None,
    device: running.Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Learn which patches the model needs for its prediction; the model itself is not changed."""
    from steadygaze.training.diffmask.loop import DiffMaskRequest

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
    from steadygaze.training.diffmask.loop import DiffMaskRun

    return running.run_training(
        lambda: DiffMaskRun(request),
        lambda result, console: print_result(request, result, console),
        f", starting from {request.warm_start}" if request.warm_start else "",
    )


def print_result(request: DiffMaskRequest, result: LearntResult, console: Console) -> None:
    """Print how training ended."""
    from steadygaze.cli.running import print_line

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
