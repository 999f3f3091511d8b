"""How `--help` looks: options in groups, flags without a value, examples at the end, at most 80 columns.

Plain text, so that help needs no import of rich. An option names its group with `rich_help_panel`, as in any
typer program, and its value with `metavar`. Lines `Example: ...` at the end of a command's docstring become
the examples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from textwrap import TextWrapper
from typing import Any

from typer.core import TyperCommand, TyperGroup

# groups of options, used as rich_help_panel; help lists them in this order, and groups of other names after
ARGUMENTS = "Arguments"
RECIPE = "Recipe"
MODEL = "Model"
CLASSES = "Text and class names"
DATA = "Data"
METHODS = "Methods and metrics"
SUITES = "Suites"
TRAINING = "Training"
RUNNING = "Execution"
OUTPUT = "Output"
SERVER = "Server"
LIMITS = "Limits"
OTHER = "Other options"
ORDER = [ARGUMENTS, RECIPE, MODEL, CLASSES, DATA, METHODS, SUITES, TRAINING, OUTPUT, RUNNING, SERVER, LIMITS]

WIDTH = 78  # columns of a line of an example; the help is indented by two
COLUMN = 24  # widest left column: longer names stand on a line of their own
EXAMPLE = re.compile(r"^Example: *(.*(?:\n(?!Example:).+)*)", re.MULTILINE)


class HelpfulCommand(TyperCommand):
    """A command whose help shows required options in the usage line, groups of options, and examples."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.help, self.examples = split_examples(self.help or "")
        self.short_help = self.short_help or one_line(self.help)
        self.epilog = "\n".join(f"Example: {example}" for example in self.examples)  # for other readers

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [usage_name(param) for param in self.params if param.param_type_name == "argument"]
        required = [
            f"{param.opts[0]} {value_name(param)}"
            for param in self.params
            if param.param_type_name == "option" and param.required
        ]
        return [*arguments, *required, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.examples, formatter)


class HelpfulGroup(TyperGroup):
    """A group of commands, listed by subject."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.help, self.examples = split_examples(self.help or "")

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # typer imports pydantic to convert None, which takes 0.1 s
        return option

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else "Commands"
                groups.setdefault(title, []).append((name, one_line(command.short_help or command.help)))
        widest = max((len(name) for rows in groups.values() for name, _ in rows), default=0)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])
        write_parameters(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.examples, formatter)


def split_examples(text: str) -> tuple[str, list[str]]:
    """The text of a help without its lines `Example: ...`, and the commands that they show.

    >>> split_examples("List methods.\\n\\nExample: steadygaze methods\\nExample: steadygaze methods --json")
    ('List methods.', ['steadygaze methods', 'steadygaze methods --json'])
    """
    examples = [one_line(match[1]) for match in EXAMPLE.finditer(text)]
    return EXAMPLE.sub("", text).rstrip(), examples


def one_line(text: str | None) -> str:
    """The first paragraph in one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


def write_parameters(parameters: Sequence[Any], ctx: Any, formatter: Any) -> None:
    """Arguments, then options by group; those without a group come last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in parameters:
        if getattr(param, "hidden", False):
            continue
        is_argument = param.param_type_name == "argument"
        title = ARGUMENTS if is_argument else getattr(param, "rich_help_panel", None) or OTHER
        name = usage_name(param).strip("[]") if is_argument else option_name(param)
        groups.setdefault(title, []).append((name, description(param, ctx)))
    others = groups.pop(OTHER, [])
    ordered = {title: groups.pop(title) for title in ORDER if title in groups} | groups
    if others:
        ordered[OTHER if ordered.keys() - {ARGUMENTS} else "Options"] = others
    for title, rows in ordered.items():
        with formatter.section(title):
            widest = min(COLUMN, max((len(name) for name, _ in rows), default=0))
            formatter.write_dl([(name.ljust(widest), text) for name, text in rows], col_max=COLUMN)


def option_name(param: Any) -> str:
    """`-m, --model MODEL`, `--json` or `--images/--no-images`; aliases of the long name are not shown."""
    names = sorted(param.opts, key=lambda name: name.startswith("--"))  # -m first; the sort is stable
    long = next((name for name in names if name.startswith("--")), names[0])
    short = [name for name in names if not name.startswith("--")][:1]
    text = ", ".join(dict.fromkeys([*short, long]))
    if param.secondary_opts:
        return f"{text}/{param.secondary_opts[0]}"
    return text if is_flag(param) else f"{text} {value_name(param)}"


def is_flag(param: Any) -> bool:
    """Whether an option takes no value."""
    return bool(getattr(param, "is_flag", False) or getattr(param, "count", False))


def value_name(param: Any) -> str:
    """What stands for the value of an option: its metavar, or its name in capitals."""
    return param.metavar or str(param.name).upper()


def usage_name(param: Any) -> str:
    """An argument in the usage line, such as `IMAGES...` or `[RECIPE]`."""
    name = value_name(param) + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def description(param: Any, ctx: Any) -> str:
    """The help of a parameter with its default value, or with "required"."""
    text = param.help or ""
    if param.required and param.param_type_name == "option":
        return f"{text} [required]".strip()
    default = param.get_default(ctx, call=False) if param.show_default else None
    if is_flag(param):
        default = "yes" if default and param.secondary_opts else None
    is_value = isinstance(default, str | int | float | PurePath)  # not a list, nor click's mark for none
    return f"{text} [default: {default}]".strip() if is_value and default != "" else text


def write_examples(examples: Sequence[str], formatter: Any) -> None:
    """The examples, each continued with a backslash where it is longer than a line."""
    if not examples:
        return
    with formatter.section("Examples"):
        for example in examples:
            for line in continued(example):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def continued(command: str) -> list[str]:
    """The lines of a command, as a shell continues them.

    >>> continued("steadygaze methods")
    ['steadygaze methods']
    """
    pieces = re.split(r" (?=-)", command)  # an option stays with its value
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + 1 + len(piece) <= WIDTH - 4:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"    {piece}")
    wrapper = TextWrapper(WIDTH - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    whole = [line for long in lines for line in wrapper.wrap(long)]
    return [f"{line} \\" for line in whole[:-1]] + whole[-1:]
