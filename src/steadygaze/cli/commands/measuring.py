"""Commands that measure and report: verify, stress, status, report, compare-models, card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli.commands import options
from steadygaze.cli.commands.parsing import (
    command_line,
    model_options,
    parse_shards,
    split_methods,
    split_names,
    split_numbers,
    text_classes,
)
from steadygaze.method_registry import DEFAULT


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
            help=f"Attribution methods, {options.METHOD_SYNTAX}. all: every method the model supports; "
            f"quick: all but the search methods. Default: {DEFAULT}.",
        ),
    ] = None,
    metrics: options.Metrics = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            "--score",
            "--scores",
            help="Quantities to explain, comma-separated: logit, log_prob, log_odds, contrast, prob. "
            "Default: each method's own.",
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="Class to explain: label, predicted, a class index or a class name.")
    ] = "label",
    start_layers: Annotated[
        str | None,
        typer.Option(
            help="all, or layers such as 0,3,6: also score each method with +plus from these layers on."
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(help="Fractions of patches to remove or keep. Default: 0.1,0.2,...,0.9."),
    ] = None,
    fill: Annotated[
        str,
        typer.Option(
            help="What replaces pixels in positive_perturbation and negative_perturbation: zero (black), "
            "mean, blur or noise."
        ),
    ] = "zero",
    diffmask: options.DiffMask = None,
    maps: Annotated[
        Path | None,
        typer.Option(
            help="Folder of maps to measure, made by this or another program (docs/maps.md). Without "
            "--methods, only these are measured."
        ),
    ] = None,
    keep_maps: Annotated[
        bool, typer.Option("--keep-maps", help="Store the maps of the methods in float16, in OUT/maps.")
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

    Example: steadygaze verify --model embedded --data photos --methods gae,gaze --out run
    """
    from steadygaze.cli.verify import estimate, run
    from steadygaze.runs.shards.shard import parse_shard
    from steadygaze.runs.verify.given_maps import maps_folder
    from steadygaze.runs.verify.plan import DEFAULT_METRICS
    from steadygaze.runs.verify.request import VerifyRequest

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
    )
    raise typer.Exit(estimate(request, numbers, json) if dry_run else run(request))


def stress(
    *,
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"Model, also a CNN or a segmenter: {options.MODEL_SOURCES}.")],
    checkpoint: options.Checkpoint = None,
    data: Annotated[
        str | None, typer.Option(help=f"{options.DATA} Not needed by shift and neighbours.")
    ] = None,
    masks: options.Masks = None,
    suites: Annotated[
        list[str],
        typer.Option(
            "--suites",
            "--suite",
            help="Suites, comma-separated; `steadygaze suites` lists them: corruptions, sequences, attacks, "
            "occlusion, attention, synthetic, shift:NAME=FOLDER, neighbours:NAME=FOLDER (with train/ and "
            "test/, or a published dataset), neighbours:NAME=TRAIN=TEST. For segmenters: segmentation.",
        ),
    ],
    corruptions: options.Corruptions = None,
    severities: options.Severities = None,
    epsilons: options.Epsilons = None,
    pgd_steps: Annotated[int, typer.Option(min=1, help="Number of PGD steps.")] = 10,
    salient: Annotated[
        str,
        typer.Option(help="Method that ranks tokens for the suite occlusion (most salient dropped first)."),
    ] = DEFAULT,
    backgrounds: Annotated[
        Path | None, typer.Option(help="Folder of background images, for the suite synthetic.")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="Accept incomplete downloads of the datasets of shift and neighbours."
        ),
    ] = False,
    bank: Annotated[
        int | None,
        typer.Option(
            min=1, help="Use at most this many training images for neighbours, spread evenly. Default: all."
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

    Options of suites from other packages are accepted too: --NAME VALUE.

    Example: steadygaze stress --model embedded --data photos --suites corruptions,occlusion --out run
    """
    from steadygaze.cli.stress import estimate, run, suite_options
    from steadygaze.runs.shards.shard import parse_shard
    from steadygaze.runs.stress.request import StressRequest

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


def report(
    *,
    runs: Annotated[
        list[Path], typer.Argument(help="Folders written by `steadygaze verify` or `steadygaze stress`.")
    ],
    baseline: Annotated[
        str | None, typer.Option(help="Method that all others are compared with. Default: the best one.")
    ] = None,
    images: options.ExampleImages = True,
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html in the first folder.")
    ] = None,
) -> None:
    """Write the results of runs as one HTML file that works offline, plus table.csv and table.md."""
    from steadygaze.cli.report import run

    raise typer.Exit(run(runs, out, baseline, images))


def export(
    *,
    runs: Annotated[
        list[Path], typer.Argument(help="Folders written by `steadygaze verify` or `steadygaze stress`.")
    ],
    to: Annotated[
        Path,
        typer.Option(help="File to write: .parquet, .csv or .jsonl.gz. With --partition, a new folder."),
    ],
    partition: Annotated[
        str | None,
        typer.Option(help="method, setting or metric: write a folder with a Parquet file for each value."),
    ] = None,
) -> None:
    """Write the rows of runs as one table for pandas, DuckDB, Spark and the like; see docs/rows.md."""
    from steadygaze.cli.report import export_runs

    raise typer.Exit(export_runs(runs, to, partition))


def status(
    *,
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of `steadygaze verify` or `steadygaze stress`, also while they run."),
    ],
    as_json: options.Json = False,
) -> None:
    """Show how far runs have come: shards, images, rows, errors, speed and time left."""
    from steadygaze.cli.scale.status import run

    raise typer.Exit(run(runs, as_json))


def compare_models(
    *,
    before: options.StressRun,
    after: Annotated[str, typer.Argument(help="The same for the other model, on the same images.")],
    setting: Annotated[
        str, typer.Option(help="Setting in which classes and single images are compared.")
    ] = "clean",
    seen: options.Seen = None,
    by_class: options.ByClass = False,
    method: options.Method = DEFAULT,
    show: Annotated[
        int, typer.Option(min=0, help="Number of newly wrong and newly correct images to show.")
    ] = 8,
    images: options.ExampleImages = True,
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: compare.html in the second folder.")
    ] = None,
) -> None:
    """Compare two stress runs: paired differences of all metrics, changes by class and by image."""
    from steadygaze.cli.compare import run

    raise typer.Exit(run(before, after, out, setting, show, images, seen=seen, by_class=by_class))


def card(
    *,
    before: Annotated[
        str,
        typer.Argument(
            help="First model: a name, NAME@WEIGHTS, or a folder written by `steadygaze train`; or the "
            "folder OUT/before of an earlier card."
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
            help="Suites, as for stress. Default: corruptions, attacks, occlusion, attention.",
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
    show: Annotated[int, typer.Option(min=0, help="Number of example images.")] = 6,
    images: options.ExampleImages = True,
    device: options.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder. Repeat the command to resume. Default: the folder card inside the second "
            "model's folder, or steadygaze-card."
        ),
    ] = None,
) -> None:
    """Compare two models on one page: accuracy, robustness, attention, faithfulness, maps, classes."""
    from steadygaze.cli.card import default_out, run
    from steadygaze.runs.card import SUITES, CardRequest

    request = CardRequest(
        data=data,
        out=out or default_out(after),
        suites=split_names(suites) or SUITES,
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
