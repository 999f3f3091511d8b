"""The command line. torch and the like are imported inside the commands to keep `steadygaze --help` quick."""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from steadygaze import __version__
from steadygaze.cli import compare, explain, lists, look, results, serve, stress, train, verify
from steadygaze.cli.options import HelpfulCommand, HelpfulGroup
from steadygaze.errors import SteadygazeError
from steadygaze.registry import load_plugin_file

__all__ = ["app", "main"]

EXPLAIN, MEASURE, RESULTS, TRAIN, LIST = "Explain", "Measure and compare", "Results of runs", "Train", "List"
_SPACE = "Free some space, or choose another output folder."
_FOLDER = "Choose another output folder."
FILE_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _SPACE),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR), _FOLDER),
}


class Commands(HelpfulGroup):
    """Prints an error of steadygaze or of the file system as one message, with exit code 2.

    `--debug`, anywhere in the command, shows the traceback instead. `--plugin FILE`, anywhere and repeatedly,
    runs Python files before the command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["debug"] = "--debug" in args
        rest, plugins = split_plugins([word for word in args if word != "--debug"])
        ctx.meta["plugins"] = plugins
        return super().parse_args(ctx, rest)

    def invoke(self, ctx: Any) -> Any:
        try:
            for file in ctx.meta["plugins"]:
                load_plugin_file(Path(file))
            return super().invoke(ctx)
        except SteadygazeError as error:
            if ctx.meta["debug"]:
                raise
            self.fail(self.message(ctx, error), error)
        except OSError as error:
            if ctx.meta["debug"] or error.errno == errno.EPIPE:  # `| head`: click ends the command
                raise
            self.fail(file_error(error), error)

    def fail(self, message: str, error: Exception) -> NoReturn:
        typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from error

    def message(self, ctx: Any, error: SteadygazeError) -> str:
        """The error in the words of the command line, with the option that it is about, if not named yet."""
        flags = {p.name: p.opts[0] for p in self.parameters(ctx) if p.opts[0].startswith("--")}
        text = in_flags(str(error), flags)
        flag = flags.get(error.option or "")
        return text if flag is None or flag in text else f"{text} ({flag})"

    def parameters(self, ctx: Any) -> list[Any]:
        """The options of the command that was called."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        # diffmask and shapley have one command: train
        while isinstance(command, TyperGroup) and len(command.commands) == 1:
            command = next(iter(command.commands.values()))
        return list(command.params) if command else []


def split_plugins(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without `--plugin FILE`, and the files.

    Examples:
        >>> split_plugins(["verify", "--plugin", "mine.py", "--plugin=b.py", "-o", "run"])
        (['verify', '-o', 'run'], ['mine.py', 'b.py'])
    """
    rest, files = [], []
    given = iter(words)
    for word in given:
        if word == "--plugin":
            file = next(given, None)
            if file is None:
                raise typer.BadParameter("expected a Python file behind --plugin")
            files.append(file)
        elif word.startswith("--plugin="):
            files.append(word.removeprefix("--plugin="))
        else:
            rest.append(word)
    return rest, files


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Replace arguments of Python by options of the command line; flags: the option of each argument.

    Examples:
        >>> in_flags("Give masks=FOLDER, or ?mask=NAME", {"masks": "--masks", "mask": "--mask"})
        'Give --masks FOLDER, or ?mask=NAME'
        >>> in_flags("mean= and std=(1, 1, 1), target='predicted'", {"mean": "--mean", "target": "--target"})
        '--mean and std=(1, 1, 1), --target predicted'
    """

    def in_words(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in flags:
            return match[0]
        value = re.sub(r",\s*", ",", value.strip("()'"))
        return f"{flags[name]} {value}".rstrip()

    return re.sub(r"(?<![\w?&.\-{\[(\"'])(?P<name>[a-z_]+)=(?P<value>\([\d., ]+\)|'\w+'|\w*)", in_words, text)


def file_error(error: OSError) -> str:
    """Describe the file, what is wrong with it, and what to do.

    Examples:
        >>> file_error(OSError(errno.ENOSPC, "No space left on device", "out/grid.png"))
        'out/grid.png: No space left on device. Free some space, or choose another output folder.'
    """
    file = "the output" if error.filename is None else error.filename
    advice = FILE_ADVICE.get(error.errno or 0, "")
    return f"{file}: {error.strerror or error}{'.' if advice else ''} {advice}".rstrip()


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is plain text: nothing is cut, and rich is not imported
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> bool:
    if requested:
        typer.echo(f"steadygaze {__version__}")
        raise typer.Exit
    return requested


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Explain vision transformers, verify the explanations, measure robustness and improve it.

    `steadygaze COMMAND -h` shows the options and examples of a command.

    Example: steadygaze demo
    Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224
    Example: steadygaze verify -m deit_tiny_patch16_224 -d photos --methods gae,gaze -o run
    """


def _add(command: Callable[..., None], group: str, name: str | None = None, **settings: Any) -> None:
    app.command(name, cls=HelpfulCommand, rich_help_panel=group, **settings)(command)


_add(explain.explain, EXPLAIN)
_add(look.attention, EXPLAIN)
_add(look.features, EXPLAIN)
_add(look.outliers, EXPLAIN)
_add(look.lens, EXPLAIN)
_add(explain.demo, EXPLAIN)
_add(serve.serve, EXPLAIN, "app")
_add(verify.verify, MEASURE)
_add(verify.calibrate, MEASURE)
_add(stress.stress, MEASURE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
_add(compare.card, MEASURE)
_add(compare.compare_models, MEASURE, "compare-models")
_add(results.report, RESULTS)
_add(results.export, RESULTS)
_add(results.status, RESULTS)
_add(results.cite, RESULTS)
_add(train.train, TRAIN)
_add(train.sweep, TRAIN)
_add(results.curves, TRAIN)
app.add_typer(train.diffmask, name="diffmask", cls=HelpfulGroup, rich_help_panel=TRAIN)
app.add_typer(train.shapley, name="shapley", cls=HelpfulGroup, rich_help_panel=TRAIN)
_add(lists.methods, LIST)
_add(lists.metrics, LIST)
_add(lists.suites, LIST)
_add(lists.losses, LIST)
_add(lists.models, LIST)


def main() -> None:
    """Run the console script. Warnings are printed as one line, without file and line number."""
    warnings.formatwarning = lambda message, *where, **more: f"warning: {message}\n"
    app(prog_name="steadygaze")
