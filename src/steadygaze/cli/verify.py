"""`steadygaze verify`: progress while it runs, the ranking at the end. `steadygaze calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import (
    DATA,
    METHODS,
    DryRun,
    ModelOptions,
    declare,
    declare_out,
    read,
    read_request,
    takes,
)
from steadygaze.cli.output import (
    Column,
    dry_run,
    guarded,
    print_line,
    print_shard,
    print_table,
    print_unreadable,
    progress_bar,
    stderr,
    stdout,
    wide,
)
from steadygaze.cli.paths import check_images, check_paths
from steadygaze.errors import InputError
from steadygaze.methods.registry import forward_passes
from steadygaze.quantity import plural
from steadygaze.runs.request import VerifyRequest

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.runs.ranking import Section
    from steadygaze.runs.rows import Rows
    from steadygaze.runs.shards import World
    from steadygaze.runs.verify import PreparedVerify
    from steadygaze.vit.view import ViT

SHOWN = 40  # lines of the printed table


@takes(VerifyRequest, ModelOptions, DryRun)
def verify(**values: Any) -> None:
    """Measure the faithfulness of attribution methods on your model and data.

    Prints a ranking of the methods and writes one row per image, method and metric; `steadygaze report`
    turns the rows into a page.

    Example: steadygaze verify -m embedded -d photos --methods gae,gaze -o run
    Example: steadygaze verify -m deit_small_patch16_224 -d imagenet/val -n 500 --methods quick -o run
    Example: steadygaze verify -m deit_small_patch16_224 -d imagenet/val --methods all --dry-run -o run
    Example: steadygaze verify --suite ground_truth --methods gaze_removal,gae,rollout
    Example: steadygaze verify --suite mosaics -m embedded -d photos --methods gae,gaze
    Example: steadygaze verify --suite funnybirds -m runs/birds -d FunnyBirds --methods gae,gaze -o run
    """
    check_paths(values)
    from steadygaze.runs.verify import prepare_verify, run_verify
    from steadygaze.untrusted import damaged_files

    numbers = read(DryRun, values).numbers
    request = read_request(VerifyRequest, values)
    if request.suite is not None:
        _verify_suite(request, dry=values["dry_run"])
        return
    if request.out is None:
        raise InputError("out: expected an output folder, got none", option="out")
    if values["dry_run"]:
        from steadygaze.runs.estimate import estimate_run

        raise typer.Exit(dry_run(partial(estimate_run, request), numbers, values["json"]))
    out = request.out

    def work(world: World, notes: Console) -> int:
        prepared = prepare_verify(request, world)
        if world.rank == 0:
            _announce(prepared, world, notes)
        with progress_bar(notes, visible=world.rank == 0) as on_progress:
            rows = run_verify(request, world, on_progress, prepared)
        if world.rank:
            return 0
        with damaged_files(*rows.folders):  # a resumed run has rows of an earlier one
            return _print_results(request, rows, wide(), prepared.source.damaged)

    raise typer.Exit(guarded(out, work))


def _verify_suite(request: VerifyRequest, dry: bool) -> None:
    """Run a suite, and print its tables."""
    from steadygaze.runs.verify import run_verify

    if dry:
        raise InputError(f"dry_run: expected a run over data, got the suite {request.suite}, which is short")
    with progress_bar(stderr()) as on_progress:
        rows = run_verify(request, on_progress=on_progress)
    console = wide()
    if request.suite == "ground_truth":
        _print_tasks(rows, console)
    else:
        for section in rows.table().sections:
            _print_ranking(section, console)
    if request.suite == "funnybirds":
        _print_parts(rows, console)
    if request.out is not None:
        where = "" if request.suite == "funnybirds" else "the folders of "
        print_line(console, f"rows in {where}{request.out}")


def _print_parts(rows: Rows, console: Console) -> None:
    """The scores of FunnyBirds' paper."""
    from steadygaze.runs.funnybirds import summary

    table = summary(rows)
    digits = {"threshold": 3}
    cells = [
        (
            [*line, *(f"{value:.{digits.get(name, 1)}f}" for name, value in zip(table, values, strict=True))],
            "",
        )
        for line, values in zip(table.index, table.to_numpy(), strict=True)
    ]
    columns = [Column("method", "name"), Column("score", "name"), *map(Column, table.columns)]
    print_table(console, columns, cells, title="scores of FunnyBirds, %")


def _print_tasks(rows: Rows, console: Console) -> None:
    """A table for each pooling: methods x tasks."""
    from steadygaze.faithfulness.metric import METRICS
    from steadygaze.runs.ground_truth import summary

    measured = [METRICS[name] for name in dict.fromkeys(row["metric"] for row in rows)]
    tables = {metric.name: summary(rows, metric.name) for metric in measured}
    first, *others = measured
    for pool, lines in tables[first.name].groupby("pool"):
        ordered = lines.droplevel("pool").sort_values("mean", ascending=first.better == "lower")
        columns = [Column("method", "name"), *map(Column, ordered.columns)]
        columns += [Column(f"{metric.title}{metric.arrow}") for metric in others]
        cells: list[tuple[list[str], str]] = []
        for method, line in zip(ordered.index, ordered.to_numpy(), strict=True):
            texts = ["-" if isnan(value) else f"{value:.2f}" for value in line]
            for metric in others:
                value = float(tables[metric.name].loc[(pool, method), "mean"])
                texts.append("-" if isnan(value) else metric.text(value))
            cells.append(([str(method), *texts], ""))
        print_table(console, columns, cells, title=f"{first.title}{first.arrow}, {pool}")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(ModelOptions):
    """The images and the options of `steadygaze calibrate`."""

    images: Sequence[str]
    halves: Annotated[
        bool,
        declare(
            METHODS, "Also try gaze_halves, which takes five passes for a map instead of two.", "--halves"
        ),
    ] = False
    limit: Annotated[
        int, declare(DATA, "Use at most N images, evenly spaced.", "--limit", "-n", metavar="N", min=1)
    ] = 48
    device: options.Device = "auto"
    out: Annotated[Path, declare_out("FILE", "Output file.")] = Path("calibration.json")


@takes(CalibrateOptions)
def calibrate(
    images: Annotated[list[str], typer.Argument(help="Image files, or folders of images; no labels needed.")],
    **values: Any,
) -> None:
    """Choose the settings of the default method that suit your model, by removing patches.

    Half of the images choose, the other half report. Writes a small JSON file, which `explain`, `verify` and
    `app` use where it is named: --method calibrated --calibration FILE.

    Example: steadygaze calibrate photos -m deit_tiny_patch16_224 -o calibration.json
    Example: steadygaze explain cat.jpg -m embedded --method calibrated --calibration calibration.json
    """
    check_paths(values)
    check_images(images, skipped=False)
    from steadygaze.data.images import find_images
    from steadygaze.faithfulness.calibrate import calibrate as search

    request = CalibrateOptions(images=images, **values)
    files = find_images(request.images)
    files = files[:: max(1, len(files) // request.limit)][: request.limit]
    notes = stderr()
    with progress_bar(notes) as on_progress:
        found = search(
            request.load(request.device),
            [str(file) for file in files],
            halves=request.halves,
            on_progress=on_progress,
        )
    found.save(request.out)
    for line in str(found).splitlines():
        print_line(stdout(), line)
    print_line(stdout(), f"wrote {request.out}")


def _announce(prepared: PreparedVerify, world: World, notes: Console) -> None:
    """Print what will be measured, and what the searches cost."""

    plan = prepared.plan
    methods = {column.method.name for column in plan.columns}
    scores = {column.score for column in plan.columns}
    each = f", {len(scores)} scores each" if len(plan.columns) > len(methods) else ""
    shared = f" ({len(plan.maps)} different maps)" if len(plan.maps) < len(plan.columns) else ""
    processes = f", {world.size} processes" if world.size > 1 else ""
    processes += f", shard {prepared.request.shard}" if prepared.request.shard else ""
    count = prepared.source.count
    images = "a stream of images" if count is None else plural(count, "image")
    print_line(
        notes,
        f"{prepared.identity['model']}: {images}, {plural(len(methods), 'method')}{each}{shared}, "
        f"{plural(len(plan.metrics), 'metric')}{processes}",
    )
    if plan.searches and (text := search_cost(prepared)):
        print_line(notes, text, "yellow")
    if prepared.source.images_without_mask:
        left_out = plural(prepared.source.images_without_mask, "image")
        print_line(notes, f"left out because they have no mask: {left_out}", "yellow")


def search_cost(prepared: PreparedVerify) -> str:
    """What the searches of a run cost, if that is more than a minute; one forward pass is timed."""
    costs = {method.name: forward_passes(method) for method, _ in prepared.plan.computed}
    searches = [method.name for method in prepared.plan.searches]
    passes = sum(costs[name] for name in searches)
    others = sum(costs.values()) - passes
    minutes = passes * (prepared.source.count or 0) * _forward_seconds(prepared.vit) / 60
    if minutes <= 1:
        return ""
    time = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.0f} minutes"
    return (
        f"{', '.join(searches)}: about {passes:,.0f} forward passes per image (the other methods: "
        f"{others:,.0f}), up to "
        f"{time} on this machine. --methods quick is all methods without such searches; NAME:budget=100 is a "
        "cheaper search"
    )


def _forward_seconds(vit: ViT) -> float:
    import torch

    parameter = next(vit.model.parameters())
    images = torch.zeros(1, *vit.plan.input_size, device=parameter.device, dtype=parameter.dtype)
    with torch.no_grad():
        for _ in range(2):  # the first warms up
            begin = monotonic()
            vit(images).sum().item()
    return monotonic() - begin


def _print_results(request: VerifyRequest, rows: Rows, console: Console, damaged: Sequence[str]) -> int:
    """The ranking, flagged maps and unreadable images; returns the exit code."""
    from steadygaze.runs.statistics import small_sample_note

    sections = rows.table().sections
    for section in sections:
        _print_ranking(section, console)
        for note in filter(None, (small_sample_note(len(section.names)), section.omission)):
            print_line(console, note, "yellow")
        if len(section.lines) > SHOWN:
            print_line(console, f"and {len(section.lines) - SHOWN} more: steadygaze report {request.out}")
    print_line(console, f"rows in {request.out}; full report: steadygaze report {request.out}")
    print_shard(rows, request.out, console)
    print_masked_models(sections, console)
    flagged = rows.flagged
    if flagged:
        counts = ", ".join(f"{method} {count}" for (method, _), count in flagged.items())
        kinds = " or ".join(sorted({flag for _, flag in flagged}))
        print_line(console, f"flagged: {sum(flagged.values())} maps ({kinds}): {counts}", "yellow")
    return print_unreadable(rows, console, damaged)


def print_masked_models(sections: Sequence[Section], console: Console) -> None:
    """Name the models whose patches cannot be removed."""
    from steadygaze.runs.ranking import masked_models

    for model in masked_models(sections):
        print_line(
            console,
            f"note: patches of {model} cannot be removed: they were hidden from attention instead (attention "
            "masking)",
            "yellow",
        )


def _print_ranking(section: Section, console: Console) -> None:
    from steadygaze.runs.ranking import SHARE, share_text

    images = plural(len(section.names), "image")
    title = f"{section.title}, {images}; ± half of the 95 % bootstrap interval, none where all images agree"
    shown = [section.quantity(metric) for metric in section.shown]
    best = {q.name: section.best(q.name) for q in shown}
    with_share = section.ceiling is not None and section.chance is not None
    rows: list[tuple[list[str], str]] = []
    for line in section.first_lines(SHOWN):
        cells = []
        for q in shown:
            cell = section.cells.get((q.name, line))
            if cell is None or isnan(cell.value):
                cells.append("-")
                continue
            half = "" if cell.low == cell.high else f" ±{q.text((cell.high - cell.low) / 2)}"
            mark = "*" if best[q.name] == line else ""
            cells.append(f"{mark}{q.text(cell.value)}{half}")
        cells += [share_text(section.share(section.shown[0], line)) or "-"] if with_share else []
        rows.append(([*line, *cells], ""))
    columns = [
        Column("method", "name"),
        Column("score", "name"),
        *(Column(f"{q.title}{q.arrow}") for q in shown),
        *([Column(SHARE)] if with_share else []),
    ]
    print_table(console, columns, rows, title=title)
    arrows = {"higher": "↑: higher is better", "lower": "↓: lower is better"}
    legend = [arrows[way] for way in arrows if any(q.better == way for q in shown)]
    chance = ["random: the chance level"] if any(line[0] == "random" for line in section.lines) else []
    ceiling = [] if section.ceiling is None else ["ceiling: the best of the searched orders"]
    print_line(console, "; ".join([*legend, "*: best method; -: not measured", *chance, *ceiling]))
