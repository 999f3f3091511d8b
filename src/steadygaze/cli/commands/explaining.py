"""Commands that show attribution maps: explain, demo, app."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli.commands import options
from steadygaze.cli.commands.parsing import split_methods
from steadygaze.method_registry import DEFAULT


def explain(
    *,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of images.")],
    model: options.Model,
    checkpoint: options.Checkpoint = None,
    methods: options.Methods = None,
    target: Annotated[
        str,
        typer.Option(help="Class to explain: auto (the predicted class), a class index, or a class name."),
    ] = "auto",
    top: Annotated[
        int, typer.Option(min=1, help="Explain this many classes of each image, the most probable ones.")
    ] = 1,
    score: Annotated[
        str | None,
        typer.Option(
            help="Quantity to explain: logit, log_prob, log_odds, contrast, prob. Default: the method's own."
        ),
    ] = None,
    signed: Annotated[
        bool, typer.Option("--signed", help="Also draw negative attributions: evidence against the class.")
    ] = False,
    patches: Annotated[
        bool, typer.Option("--patches", help="Also write overlays without interpolation between patches.")
    ] = False,
    diffmask: options.DiffMask = None,
    batch_size: options.BatchSize = 8,
    num_classes: options.NumClasses = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("steadygaze-out"),
) -> None:
    """Explain predictions: which patches is a prediction based on?

    Writes an overlay for each image and method, a grid that compares the methods, scores.npz and
    manifest.json. Unreadable files are skipped and listed at the end, and the exit code is 1.

    Example: steadygaze explain cat.jpg --model deit_tiny_patch16_224 --methods gae,gaze
    """
    from steadygaze.cli.explain import ExplainOptions, run

    request = ExplainOptions(
        images=images,
        model=model,
        checkpoint=checkpoint,
        methods=split_methods(methods or [DEFAULT]),
        target=target,
        top=top,
        score=score,
        signed=signed,
        patches=patches,
        diffmask=diffmask,
        batch_size=batch_size,
        num_classes=num_classes,
        trust_remote_code=trust_remote_code,
        device=device,
        out=out,
    )
    raise typer.Exit(run(request))


def demo(out: Annotated[Path, typer.Option(help="Output folder.")] = Path("steadygaze-demo")) -> None:
    """Explain small example images with six methods and an embedded model. Needs no network."""
    from steadygaze.cli.explain import run_demo

    raise typer.Exit(run_demo(out))


def serve(
    *,
    model: options.Model = "embedded",
    checkpoint: options.Checkpoint = None,
    diffmask: options.DiffMask = None,
    num_classes: options.NumClasses = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    host: Annotated[
        str,
        typer.Option(
            help="Address to bind. The default, 127.0.0.1, accepts connections from this machine only; "
            "0.0.0.0 accepts connections from the network."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to bind.")] = 7860,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve an interactive page: explain an image, test the explanation, remove patches (extra: app)."""
    from steadygaze.cli.serving import run

    code = run(
        model,
        checkpoint,
        num_classes,
        diffmask,
        device,
        host,
        port,
        open_browser,
        trust_remote_code=trust_remote_code,
    )
    raise typer.Exit(code)
