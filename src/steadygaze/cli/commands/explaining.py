"""Commands that show attribution maps: explain, demo, app."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli import options
from steadygaze.cli.options import (
    DATA,
    LIMITS,
    METHODS,
    OUTPUT,
    SERVER,
    model_options,
    parse_region,
    split_methods,
    text_classes,
)
from steadygaze.methods.registry import DEFAULT


def explain(
    *,
    images: Annotated[
        list[str],
        typer.Argument(help="Image files, folders of images, or streamed data: 'wds:a.tar', 'hf:./folder'."),
    ],
    model: options.Model,
    checkpoint: options.Checkpoint = None,
    method: options.ExplainMethod = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            help="Class to explain: auto (the predicted class, the most probable label), an index or a name.",
            rich_help_panel=METHODS,
        ),
    ] = "auto",
    top: Annotated[
        int,
        typer.Option(
            metavar="K",
            min=1,
            help="Explain the K most probable classes or labels of each image; at most 100.",
            rich_help_panel=METHODS,
        ),
    ] = 1,
    score: Annotated[
        str | None,
        typer.Option(
            help="Quantity to explain: logit, log_prob, log_odds, contrast, prob. Default: the method's own.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    signed: Annotated[
        bool,
        typer.Option(
            "--signed",
            help="Also draw negative attributions: evidence against the class.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    patches: Annotated[
        bool,
        typer.Option(
            "--patches",
            help="Also write overlays without interpolation between patches.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    diffmask: options.DiffMask = None,
    maps: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also store the maps in this folder, in float16, for `verify --maps`. Keys are paths "
            "relative to the given folders, or file names.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", metavar="N", min=1, help="Explain at most N images.", rich_help_panel=DATA
        ),
    ] = None,
    shapley: options.Shapley = None,
    batch_size: options.BatchSize = 8,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    model_kwargs: options.ModelKwargs = None,
    task: options.Task = None,
    text: options.Text = None,
    class_names: options.ClassNames = None,
    template: options.Template = None,
    region: options.RegionText = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    shard: options.Shard = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Output folder. Overlays that an earlier run wrote into it are removed.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("steadygaze-out"),
) -> None:
    """Explain predictions: which patches is a prediction based on?

    Writes an overlay for each image and method, a grid that compares the methods, scores.npz and
    manifest.json. Unreadable files are skipped and listed at the end, and the exit code is 1. Ctrl-C ends the
    current search and keeps its map so far; a second one within two seconds ends the command.

    Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224
    Example: steadygaze explain photos -m deit_tiny_patch16_224 --method gae,gaze --top 3 -o maps
    Example: steadygaze explain cat.jpg -m openai/clip-vit-base-patch32 --text "a cat" --text "a dog"
    Example: steadygaze explain street.jpg -m ./segformer --region point=120,80 --target road
    """
    from steadygaze.cli.explain import ExplainOptions, run
    from steadygaze.runs.shards import parse_shard

    request = ExplainOptions(
        images=images,
        model=model,
        checkpoint=checkpoint,
        methods=split_methods(method or [DEFAULT]),
        target=target,
        top=top,
        score=score,
        signed=signed,
        patches=patches,
        diffmask=diffmask,
        maps=maps,
        limit=limit,
        shapley=shapley,
        batch_size=batch_size,
        num_classes=num_classes,
        model_options=model_options(None, image_size, mean, std, model_kwargs),
        task=task,
        trust_remote_code=trust_remote_code,
        words=text_classes(text, class_names, template),
        region=parse_region(region),
        device=device,
        shard=parse_shard(shard),
        out=out,
    )
    raise typer.Exit(run(request))


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")] = Path(
        "steadygaze-demo"
    ),
) -> None:
    """Explain the bundled example images with six methods and the embedded model. Needs no network.

    Example: steadygaze demo
    """
    from steadygaze.cli.explain import run_demo

    raise typer.Exit(run_demo(out))


def serve(
    *,
    model: options.Model = "embedded",
    checkpoint: options.Checkpoint = None,
    diffmask: options.DiffMask = None,
    shapley: options.Shapley = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    model_kwargs: options.ModelKwargs = None,
    task: options.Task = None,
    text: options.Text = None,
    class_names: options.ClassNames = None,
    template: options.Template = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to bind. By default 127.0.0.1, which accepts connections from this machine only, "
            "under the names localhost, 127.0.0.1 and [::1]; 0.0.0.0 accepts connections from the network. "
            "With --host, requests for every host name are accepted.",
            rich_help_panel=SERVER,
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", "-p", min=1, max=65535, help="Port to bind.", rich_help_panel=SERVER)
    ] = 7860,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser.", rich_help_panel=SERVER)
    ] = False,
    max_methods: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Maximum number of methods per call.", rich_help_panel=LIMITS),
    ] = 12,
    max_budget: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Maximum number of forward passes per method.", rich_help_panel=LIMITS
        ),
    ] = 2_000,
    max_cost: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Maximum number of forward passes per call.", rich_help_panel=LIMITS
        ),
    ] = 5_000,
    max_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="Maximum running time of a call; it is then cancelled.",
            rich_help_panel=LIMITS,
        ),
    ] = 60.0,
    max_upload_mb: Annotated[
        float,
        typer.Option(metavar="MB", min=0.1, help="Maximum size of an uploaded file.", rich_help_panel=LIMITS),
    ] = 20.0,
    max_calls: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum number of waiting calls.",
            rich_help_panel=LIMITS,
        ),
    ] = 100,
) -> None:
    """Serve an interactive page: explain an image, test the explanation, remove patches (extra: app).

    Example: steadygaze app
    Example: steadygaze app -m deit_small_patch16_224 --port 8080 --open
    """
    from steadygaze.app import Limits
    from steadygaze.cli.serve import run

    limits = Limits(
        max_methods=max_methods,
        max_budget=max_budget,
        max_cost=max_cost,
        max_seconds=max_seconds,
        max_upload_mb=max_upload_mb,
        max_calls=max_calls,
    )
    code = run(
        model,
        checkpoint,
        num_classes,
        diffmask,
        shapley,
        device,
        host,
        port,
        open_browser,
        limits,
        model_options=model_options(None, image_size, mean, std, model_kwargs),
        task=task,
        trust_remote_code=trust_remote_code,
        words=text_classes(text, class_names, template),
    )
    raise typer.Exit(code)
