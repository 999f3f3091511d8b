"""Commands around training: train, sweep, curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import OUTPUT, RECIPE, RUNNING, command_line, parse_shards, split_names

ListFlag = Annotated[
    bool,
    typer.Option(
        "--list", help="List the shipped ones with their cost and measured results.", rich_help_panel=RECIPE
    ),
]
Show = Annotated[
    bool, typer.Option("--show", help="Print the TOML text instead of running it.", rich_help_panel=RECIPE)
]


def _set(metavar: str, text: str) -> Any:
    return typer.Option("--set", metavar=metavar, help=text, rich_help_panel=RECIPE)


def _out(metavar: str, text: str) -> Any:
    return typer.Option("--out", "-o", metavar=metavar, help=text, rich_help_panel=OUTPUT)


def _check_show(show: bool, settings: list[str] | None) -> None:
    if show and settings:
        raise typer.BadParameter(
            "--show prints the file without changes: expected no --set beside it. Remove one of the two."
        )


def train(
    *,
    recipe: Annotated[
        str | None, typer.Argument(help="TOML file, or the name of a shipped recipe (see --list).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        _set(
            "KEY=VALUE",
            "Override a value of the recipe: data.train=FOLDER, seed=1, epochs=3. May be repeated.",
        ),
    ] = None,
    list_recipes: ListFlag = False,
    show: Show = False,
    device: Annotated[
        str,
        typer.Option(
            help="auto or cpu. For several GPUs or processes, use accelerate launch.", rich_help_panel=RUNNING
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        _out("FOLDER", "Output folder. Repeat the command to resume. Default: steadygaze-train/RECIPE."),
    ] = None,
    dry_run: options.DryRun = False,
    shards: options.Shards = None,
    json: options.DryRunJson = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train or fine-tune from a recipe, with losses and modules that improve robustness and attributions.

    Example: steadygaze train --list
    Example: steadygaze train cifar10-tap --set data.train=cifar10/train -o run
    Example: steadygaze train my.toml --set seed=1 --dry-run
    """
    from steadygaze.cli import train as command

    numbers = parse_shards(dry_run, shards, json)
    if list_recipes:
        raise typer.Exit(command.list_recipes())
    if recipe is None:
        raise typer.BadParameter("expected a recipe: a TOML file, or a name from `steadygaze train --list`")
    _check_show(show, settings)
    if show:
        raise typer.Exit(command.show_recipe(recipe))
    folder = out or Path("steadygaze-train") / Path(recipe).stem
    if dry_run:
        raise typer.Exit(
            command.estimate(
                recipe, folder, settings or [], device, numbers, json, trust_remote_code=trust_remote_code
            )
        )
    raise typer.Exit(
        command.run(
            recipe, folder, settings or [], device, command_line(), trust_remote_code=trust_remote_code
        )
    )


def sweep(
    *,
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe or sweep: a TOML file, or the name of a shipped one (see --list)."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        _set(
            "KEY=VALUES",
            "Values of the recipe; comma-separated values are swept: losses.adl.tau=1,2,3,5. A list is one "
            "value: data.images=[0,3],[0,6]. modules.tap=none omits a module or loss.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of seeds of each combination: 0, 1, ... Default: those of the sweep, or 1.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    list_sweeps: ListFlag = False,
    show: Show = False,
    device: Annotated[str, typer.Option(help="auto or cpu.", rich_help_panel=RUNNING)] = "auto",
    out: Annotated[
        Path | None,
        _out("FOLDER", "Output folder. Repeat the command to resume. Default: steadygaze-sweep/RECIPE."),
    ] = None,
    shard: options.Shard = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the request, list the runs and estimate their training time.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train a grid of recipes, measure each model with the stress run of its recipe, and compare them.

    Writes table.md, table.csv and sweep.svg, with intervals over seeds and images.

    Example: steadygaze sweep cifar10-tap-adl --set losses.adl.tau=1,2,3,5 --seeds 3 -o runs/tau
    """
    from steadygaze.cli import sweep as command
    from steadygaze.runs.shards import parse_shard

    if list_sweeps:
        raise typer.Exit(command.list_sweeps())
    if recipe is None:
        raise typer.BadParameter("expected a recipe or sweep: a TOML file, or a name from --list")
    _check_show(show, settings)
    if show:
        raise typer.Exit(command.show_sweep(recipe))
    raise typer.Exit(
        command.run(
            recipe,
            out or Path("steadygaze-sweep") / Path(recipe).stem,
            settings or [],
            seeds,
            parse_shard(shard),
            device,
            command_line(),
            dry_run=dry_run,
            trust_remote_code=trust_remote_code,
        )
    )


def curves(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders written by `steadygaze train`.")],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns",
            help="Columns of log.csv, comma-separated. Default: all columns that hold numbers.",
        ),
    ] = None,
    out: Annotated[
        Path | None, _out("FILE", "SVG file to write. Default: curves.svg in the first folder.")
    ] = None,
) -> None:
    """Plot the training curves of one or more runs as an SVG file.

    Example: steadygaze curves run0 run1 --columns loss,accuracy -o curves.svg
    """
    from steadygaze.cli.curves import run

    raise typer.Exit(run(runs, out, split_names(columns)))
