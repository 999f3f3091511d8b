"""Commands around training: train, curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli.commands import options
from steadygaze.cli.commands.parsing import command_line, parse_shards, split_names


def train(
    *,
    recipe: Annotated[
        str | None, typer.Argument(help="TOML file, or the name of a shipped recipe (see --list).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe value: data.train=FOLDER, seed=1, epochs=3, ..."),
    ] = None,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the shipped recipes with their cost and measured results.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe instead of running it.")] = False,
    device: Annotated[
        str, typer.Option(help="auto or cpu. For several GPUs or processes, use accelerate launch.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder. Repeat the command to resume. Default: steadygaze-train/RECIPE."),
    ] = None,
    dry_run: options.DryRun = False,
    shards: options.Shards = None,
    json: options.DryRunJson = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train or fine-tune from a recipe, with losses and modules that improve robustness and attributions.

    Example: steadygaze train cifar10-tap --set data.train=cifar10/train --out run
    """
    from steadygaze.cli import train as command

    numbers = parse_shards(dry_run, shards, json)
    if list_recipes:
        raise typer.Exit(command.list_recipes())
    if recipe is None:
        raise typer.BadParameter("expected a recipe: a TOML file, or a name from `steadygaze train --list`")
    if show and settings:
        raise typer.BadParameter(
            "--show prints the recipe without changes: expected no --set beside it. Remove one of the two."
        )
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


def curves(
    *,
    runs: Annotated[list[Path], typer.Argument(help="Folders written by `steadygaze train`.")],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns",
            "--column",
            help="Columns of log.csv, comma-separated. Default: all columns that hold numbers.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="SVG file to write. Default: curves.svg in the first folder.")
    ] = None,
) -> None:
    """Plot the training curves of one or more runs as an SVG file."""
    from steadygaze.cli.curves import run

    raise typer.Exit(run(runs, out, split_names(columns)))
