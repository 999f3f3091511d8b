"""`steadygaze diffmask train`: gates that learn which patches a model does not need. Torch is imported inside the command.

Exit code: 0, all is well; 1, the masks diverged or have not begun to close, or pictures could not be read; 2, wrong input; 3, the file
could not be written; 130, stopped by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

diffmask = typer.Typer(no_args_is_help=True, help="Vision DiffMask: train the gates that --diffmask takes.")


@diffmask.callback()
def top() -> None:
    """Vision DiffMask: train the gates that `--diffmask FILE` takes in `explain` and `verify`."""


@diffmask.command()
def train(
    model: Annotated[
        str,
        typer.Option(
            help="timm name, torchvision:NAME, transformers folder or owner/name, a folder of `train`, or 'embedded'."
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(help="Folder of pictures, at any depth; labels are not needed. May be repeated."),
    ],
    out: Annotated[
        Path, typer.Option(help="The mask, .safetensors; the same command goes on where it stopped.")
    ],
    checkpoint: Annotated[Path | None, typer.Option(help="Local weights of the model.")] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="cifar10 (the default), imagenet: the paper's values; reference: its code's choices."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps. Default: by --epochs.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times through the pictures.")] = 5,
    batch: Annotated[int | None, typer.Option(min=1, help="Pictures a step. Default: 16.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of everything that is drawn at random. Default: 0.")
    ] = None,
    gate_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the gates. Default: 2e-5.")
    ] = None,
    baseline_rate: Annotated[
        float | None, typer.Option(help="Of the vector that stands for masked patches: 1e-3.")
    ] = None,
    dual_rate: Annotated[
        float | None, typer.Option(help="Of λ, the price of changing the answer. Default: 0.3.")
    ] = None,
    dual_start: Annotated[float | None, typer.Option(min=0, help="λ at the start. Default: 20.")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps until the rates are full. Default: 1200.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="How far the answer may change (KL). Default: 0.1.")
    ] = None,
    stretch: Annotated[float | None, typer.Option(help="α, the range of the gates. Default: 15.")] = None,
    shift: Annotated[float | None, typer.Option(help="β, where the gates begin. Default: 8.")] = None,
    dual: Annotated[str | None, typer.Option(help="ascent, or reference: λ with its code's sign.")] = None,
    l0: Annotated[str | None, typer.Option(help="norm, or log as in its code.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="patches, or all: prefix tokens counted, as in its code.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="uniform or weighted: how the last gate of a step is drawn.")
    ] = None,
    slow: Annotated[
        str | None, typer.Option(help="start, or first_sync as in its code: Lookahead's slow weights.")
    ] = None,
    kl: Annotated[
        str | None, typer.Option(help="all: keep the whole distribution; class: keep one class.")
    ] = None,
    begin: Annotated[
        str | None, typer.Option(help="drawn: random first weights; open: all patches kept at first.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="That class, by number or name. Default: the predicted one.")
    ] = None,
    warm_start: Annotated[Path | None, typer.Option(help="Begin from a mask of the same widths.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Begin anew so often if the masks go all on or all off.")
    ] = 0,
    restart_with: Annotated[str, typer.Option(help="seed: the next one; stretch: also α + 5.")] = "seed",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two saves.")] = 200,
    num_classes: Annotated[
        int | None, typer.Option(help="Width of the classifier, if not the checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
) -> None:
    """Learn which patches the model needs for its answer; the model itself is not changed."""
    chosen = {
        "batch": batch, "seed": seed, "gate_rate": gate_rate, "baseline_rate": baseline_rate, "dual_rate": dual_rate, "warmup": warmup,
        "dual_start": dual_start, "margin": margin, "stretch": stretch, "shift": shift, "dual": dual, "l0": l0, "tokens": tokens,
        "layers": layers, "slow": slow, "begin": begin, "kl": kl or ("class" if target is not None else None),
    }  # fmt: skip
    presets = tuple(word.strip() for text in preset or () for word in text.split(",") if word.strip())
    raise typer.Exit(
        run(
            model=model, data=data, out=out, checkpoint=checkpoint, presets=presets, chosen=chosen, target=target, steps=steps,
            epochs=epochs, warm_start=warm_start, restarts=restarts, restart_with=restart_with, save_every=save_every,
            num_classes=num_classes, device=device,
        )
    )  # fmt: skip


def run(**asked: Any) -> int:
    """Do it; gives the exit code."""
    from rich.console import Console

    from steadygaze.cli.running import progress, say
    from steadygaze.errors import RowsNotWritten
    from steadygaze.runs.processes import World
    from steadygaze.training.diffmask.loop import Request, Run

    console, notes = Console(), Console(stderr=True)
    request = Request(**asked)
    ready = Run(request)
    begun = (
        f", {ready.trainer.steps} done before"
        if ready.trainer.steps
        else f", from {request.warm_start}"
        if request.warm_start
        else ""
    )
    say(
        notes,
        f"{request.model}: {len(ready.album.files)} pictures, {ready.steps} steps of {ready.asked.batch}{begun}",
    )
    try:
        with progress(ready.steps, World(), notes, verb="training", unit="steps") as told:
            ended = ready.go(told, lambda text: say(notes, text))
    except RowsNotWritten as error:
        say(notes, f"error: {error}", "red")
        return 3
    except KeyboardInterrupt:
        say(notes, f"stopped; the same command goes on where it stopped ({request.out})")
        return 130
    found, first = ended.found, ended.began
    say(
        console,
        f"{request.out}: {ended.steps} steps; all gates together keep {100 * found.l0:.1f} % of the patches, "
        f"KL {found.kl:.3f}, same answer for {100 * found.accuracy:.1f} %"
        + (
            f" (before training: {100 * first.l0:.1f} %, {first.kl:.3f}, {100 * first.accuracy:.1f} %)"
            if first
            else ""
        ),
    )
    for why in ended.unreadable[:20]:
        say(console, f"not used: {why}", "red")
    if ended.early:
        do = "Go on with more --steps, or begin anew with a higher --gate-rate"
        say(console, f"not trained yet: {ended.wrong}, as they began. {do}", "red")
    elif ended.wrong:
        say(console, f"diverged: {ended.wrong}. Try --restarts 3, --restart-with stretch, another --seed or other rates (with a new --out)",
            "red")  # fmt: skip
    return 1 if ended.wrong or ended.unreadable else 0
