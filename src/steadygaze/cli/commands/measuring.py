"""Commands that measure: verify, stress, card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli import options
from steadygaze.cli.options import (
    DATA,
    METHODS,
    MODEL,
    OUTPUT,
    SUITES,
    command_line,
    model_options,
    parse_shards,
    split_methods,
    split_names,
    split_numbers,
    text_classes,
)
from steadygaze.methods.registry import DEFAULT


def verify(
    *,
    model: options.Model,
    checkpoint: options.Checkpoint = None,
    data: options.Data,
    masks: options.Masks = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            "--method",
            "-M",
            help=f"Attribution methods, {options.METHOD_SYNTAX}. all: every method the model supports; "
            f"quick: all but the search methods. Default: {DEFAULT}.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    random: Annotated[
        bool,
        typer.Option(
            "--random/--no-random",
            help="Also measure the method random, the chance level.",
            rich_help_panel=METHODS,
        ),
    ] = True,
    metrics: options.Metrics = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            "--score",
            "--scores",
            help="Quantities to explain, comma-separated: logit, log_prob, log_odds, contrast, prob. "
            "Default: each method's own.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            help="Class to explain: label, predicted, a class index or a class name.",
            rich_help_panel=METHODS,
        ),
    ] = "label",
    start_layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Also measure each method with +plus, starting at these layers: all, or 0,3,6.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Fractions of patches to remove or keep. Default: 0.1,0.2,...,0.9.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    fill: Annotated[
        str,
        typer.Option(
            help="Pixel values of removed patches in positive_perturbation and negative_perturbation: zero "
            "(black), mean, blur or noise.",
            rich_help_panel=METHODS,
        ),
    ] = "zero",
    diffmask: options.DiffMask = None,
    maps: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Stored maps to measure, written by `explain --maps` or another program (docs/maps.md). "
            "Without --methods, only these are measured.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    keep_maps: Annotated[
        bool,
        typer.Option("--keep-maps", help="Store the maps in float16, in OUT/maps.", rich_help_panel=OUTPUT),
    ] = False,
    shapley: options.Shapley = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 16,
    num_workers: options.NumWorkers = None,
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
    shard: options.Shard = None,
    dry_run: options.DryRun = False,
    shards: options.Shards = None,
    json: options.DryRunJson = False,
    out: options.Out,
) -> None:
    """Measure the faithfulness of attribution methods on your model and data.

    Prints a ranking of the methods and writes one row per image, method and metric; `steadygaze report`
    turns the rows into a page.

    Example: steadygaze verify -m embedded -d photos --methods gae,gaze -o run
    Example: steadygaze verify -m deit_small_patch16_224 -d imagenet/val -n 500 --methods quick -o run
    Example: steadygaze verify -m deit_small_patch16_224 -d imagenet/val --methods all --dry-run -o run
    """
    from steadygaze.cli.verify import estimate, run
    from steadygaze.runs.plan import DEFAULT_METRICS
    from steadygaze.runs.shards import parse_shard
    from steadygaze.runs.verify import VerifyRequest, maps_folder

    numbers = parse_shards(dry_run, shards, json)
    request = VerifyRequest(
        model=model,
        data=data,
        out=out,
        checkpoint=checkpoint,
        masks=masks,
        methods=split_methods(methods or ([DEFAULT] if maps is None else [])),
        metrics=split_names(metrics) or DEFAULT_METRICS,
        scores=split_names(score) or None,
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        start_layers=start_layers,
        ratios=split_numbers(ratios, "ratios"),
        fill=fill,
        target=target,
        num_workers=num_workers,
        num_classes=num_classes,
        model_options=model_options(None, image_size, mean, std, model_kwargs),
        task=task,
        trust_remote_code=trust_remote_code,
        words=text_classes(text, class_names, template),
        device=device,
        command=command_line(),
        diffmask=diffmask,
        shard=parse_shard(shard),
        maps=maps,
        keep_maps=maps_folder(keep_maps, out),
        shapley=shapley,
        random=random,
    )
    raise typer.Exit(estimate(request, numbers, json) if dry_run else run(request))


def stress(
    *,
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help=f"Model, also a CNN or a segmenter: {options.MODEL_SOURCES}.",
            rich_help_panel=MODEL,
        ),
    ],
    checkpoint: options.Checkpoint = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help=f"{options.DATA_SOURCES} Not needed by shift and neighbors.",
            rich_help_panel=DATA,
        ),
    ] = None,
    masks: options.Masks = None,
    suites: Annotated[
        list[str],
        typer.Option(
            "--suites",
            "--suite",
            "-s",
            help="Suites, comma-separated; `steadygaze suites` lists them: corruptions, sequences, attacks, "
            "occlusion, attention, synthetic, shift:NAME=FOLDER, neighbors:NAME=FOLDER (with train/ and "
            "test/, or a published dataset), neighbors:NAME=TRAIN=TEST. For segmenters: segmentation.",
            rich_help_panel=SUITES,
        ),
    ],
    corruptions: options.Corruptions = None,
    severities: options.Severities = None,
    epsilons: options.Epsilons = None,
    pgd_steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of PGD steps.", rich_help_panel=SUITES)
    ] = 10,
    salient: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="Attribution method that ranks the tokens in the suite occlusion.",
            rich_help_panel=SUITES,
        ),
    ] = DEFAULT,
    backgrounds: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Background images, for the suite synthetic.", rich_help_panel=SUITES
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Accept incomplete downloads of the datasets of shift and neighbors.",
            rich_help_panel=SUITES,
        ),
    ] = False,
    bank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Use at most N training images for neighbors, spread evenly. Default: all.",
            rich_help_panel=SUITES,
        ),
    ] = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 16,
    num_workers: options.NumWorkers = None,
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
    shard: options.Shard = None,
    dry_run: options.DryRun = False,
    shards: options.Shards = None,
    json: options.DryRunJson = False,
    out: options.Out,
) -> None:
    """Measure robustness: accuracy, calibration and attention under corruption, shift, attack and occlusion.

    Prints the scores of each suite and writes one row per image, setting and metric. Options of suites from
    other packages are accepted too: --NAME VALUE.

    Example: steadygaze stress -m embedded -d photos --suites corruptions,occlusion -o run
    Example: steadygaze stress -m resnet50 -d imagenet/val -n 500 --suites corruptions --severities 3 -o run
    Example: steadygaze stress -m deit_small_patch16_224 --suites shift:imagenet-a=imagenet-a -o run
    """
    from steadygaze.cli.stress import estimate, run, suite_options
    from steadygaze.runs.shards import parse_shard
    from steadygaze.runs.stress import StressRequest

    declared = {
        "corruptions": corruptions,
        "severities": severities,
        "epsilons": epsilons,
        "pgd_steps": pgd_steps,
        "salient": salient,
        "backgrounds": backgrounds,
        "partial": partial,
        "bank": bank,
    }
    numbers = parse_shards(dry_run, shards, json)
    request = StressRequest(
        model=model,
        data=data,
        out=out,
        suites=suites,
        options={**declared, **suite_options(context.args)},
        checkpoint=checkpoint,
        masks=masks,
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        num_workers=num_workers,
        num_classes=num_classes,
        model_options=model_options(None, image_size, mean, std, model_kwargs),
        task=task,
        trust_remote_code=trust_remote_code,
        words=text_classes(text, class_names, template),
        device=device,
        command=command_line(),
        shard=parse_shard(shard),
    )
    raise typer.Exit(estimate(request, numbers, json) if dry_run else run(request))


def card(
    *,
    before: Annotated[
        str,
        typer.Argument(
            help="First model: a name, NAME@WEIGHTS, or a folder written by `steadygaze train`; or the "
            "folder OUT/before of an earlier card.",
        ),
    ],
    after: Annotated[str, typer.Argument(help="Second model, in the same forms.")],
    data: options.OptionalData = None,
    masks: options.Masks = None,
    methods: options.Methods = None,
    metrics: options.Metrics = None,
    suites: Annotated[
        list[str] | None,
        typer.Option(
            "--suites",
            "--suite",
            "-s",
            help="Suites, as for stress. Default: corruptions, attacks, occlusion, attention.",
            rich_help_panel=SUITES,
        ),
    ] = None,
    corruptions: options.Corruptions = None,
    severities: options.Severities = None,
    epsilons: options.Epsilons = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 16,
    class_names: options.ClassNames = None,
    image_size: options.ImageSize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    model_kwargs: options.ModelKwargs = None,
    show: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of example images.", rich_help_panel=OUTPUT)
    ] = 6,
    images: options.ExampleImages = True,
    device: options.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Output folder. Repeat the command to resume. Default: the folder card inside the second "
            "model's folder, or steadygaze-card.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Compare two models on one page: accuracy, robustness, attention, faithfulness, maps, classes.

    Measures both models on the same images, prints the differences and writes card.html.

    Example: steadygaze card deit_tiny_patch16_224 run -d imagenet/val -n 500
    Example: steadygaze card vit_tiny@a.safetensors vit_tiny@b.safetensors -d photos -o card
    """
    from steadygaze.cli.card import default_out, run
    from steadygaze.runs.before_after import SUITES as DEFAULT_SUITES
    from steadygaze.runs.before_after import CardRequest

    request = CardRequest(
        data=data,
        out=out or default_out(after),
        suites=split_names(suites) or DEFAULT_SUITES,
        methods=split_methods(methods or [DEFAULT]),
        metrics=split_names(metrics),
        masks=masks,
        options={"corruptions": corruptions, "severities": severities, "epsilons": epsilons},
        model_options=model_options(class_names, image_size, mean, std, model_kwargs),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        device=device,
        command=command_line(),
    )
    raise typer.Exit(run(before, after, request, show, images))
