"""The command line. torch and the like are imported inside the commands to keep `steadygaze --help` quick."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steadygaze import __version__
from steadygaze.cli.commands import explaining, listing, measuring, training
from steadygaze.cli.diffmask import diffmask as diffmask_commands
from steadygaze.errors import SteadygazeError

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """Prints an error of steadygaze as one message, exit code 2; `--debug`, anywhere, shows its traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["debug"] = "--debug" in args
        return super().parse_args(ctx, [word for word in args if word != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SteadygazeError as error:
            if ctx.meta["debug"]:
                raise
            typer.secho(f"error: {error}{self.flag(ctx, error)}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error

    def flag(self, ctx: Any, error: SteadygazeError) -> str:
        """The command's option that the error is about, such as " (--masks)"; "" if there is none."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        while (
            isinstance(command, TyperGroup) and len(command.commands) == 1
        ):  # diffmask has one command: train
            command = next(iter(command.commands.values()))
        for parameter in command.params if command else ():
            if parameter.name == error.option and parameter.opts[0] not in str(error):
                return f" ({parameter.opts[0]})"
        return ""


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> bool:
    if requested:
        typer.echo(f"steadygaze {__version__}")
        raise typer.Exit
    return requested


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Explain vision transformers, verify the explanations, measure robustness and improve it."""


app.command()(explaining.explain)
app.command()(measuring.verify)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(measuring.stress)
app.command("compare-models")(measuring.compare_models)
app.command()(measuring.report)
app.command()(training.train)
app.command()(measuring.card)
app.command()(training.curves)
app.add_typer(diffmask_commands, name="diffmask")
app.command()(explaining.demo)
app.command("app")(explaining.serve)
app.command()(listing.methods)
app.command()(listing.metrics)
app.command()(listing.suites)
app.command()(listing.losses)
app.command()(listing.models)


def main() -> None:
    """The console script. Warnings are printed as one line, without file and line number."""
    warnings.formatwarning = lambda message, *where, **more: f"warning: {message}\n"
    app(prog_name="steadygaze")
