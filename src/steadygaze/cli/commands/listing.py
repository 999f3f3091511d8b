"""Commands that list what can be named: methods, metrics, suites, losses, models."""

from __future__ import annotations

from typing import Annotated

import typer

from steadygaze.cli import options


def methods(*, as_json: options.Json = False) -> None:
    """List the attribution methods.

    Example: steadygaze methods
    Example: steadygaze methods --json
    """
    from steadygaze.cli.lists import print_methods

    print_methods(as_json)


def metrics(*, as_json: options.Json = False) -> None:
    """List the metrics of `steadygaze verify`.

    Example: steadygaze metrics
    Example: steadygaze metrics --json
    """
    from steadygaze.cli.lists import print_metrics

    print_metrics(as_json)


def suites(*, as_json: options.Json = False) -> None:
    """List the suites of `steadygaze stress`.

    Example: steadygaze suites
    Example: steadygaze suites --json
    """
    from steadygaze.cli.lists import print_suites

    print_suites(as_json)


def losses(*, as_json: options.Json = False) -> None:
    """List the losses that training recipes can name.

    Example: steadygaze losses
    Example: steadygaze losses --json
    """
    from steadygaze.cli.lists import print_losses

    print_losses(as_json)


def models(
    *,
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "*",
    as_json: options.Json = False,
) -> None:
    """List the models that can be loaded by name.

    Example: steadygaze models deit
    Example: steadygaze models 'vit_*_384*' --json
    """
    from steadygaze.cli.lists import print_models

    print_models(pattern, as_json)
