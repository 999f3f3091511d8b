"""Pages of the reference for the commands, made from their declaration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from steadygaze.cli import app
from tools.docs_site.entries import fence, joined, table


def commands() -> Iterator[tuple[str, Any]]:
    """(name with its group, click command) of every command."""
    root: Any = typer.main.get_command(app)

    def walk(prefix: str, group: Any) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            full = f"{prefix}{name}"
            if getattr(command, "commands", None):
                yield from walk(f"{full} ", command)
            elif not command.hidden:
                yield full, command

    yield from walk("", root)


def pages() -> dict[str, str]:
    """Path -> Markdown of every command, and of the list of them."""
    found = dict(commands())
    rows = [(f"[`steadygaze {name}`]({name.replace(' ', '-')}.md)", summary(c)) for name, c in found.items()]
    index = ["# Commands", table(("command", "what it does"), rows)]
    index.append("`steadygaze COMMAND --help` prints the same in a terminal.")
    result = {"reference/commands/index.md": joined(index)}
    for name, command in found.items():
        result[f"reference/commands/{name.replace(' ', '-')}.md"] = page(name, command)
    return result


def page(name: str, command: Any) -> str:
    """Usage, examples, arguments, and the options in the groups of `--help`."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    required = [f"{p.opts[0]} {p.name.upper()}" for p in options if p.required]
    usage = ["steadygaze", name, *(p.name.upper() for p in arguments), *required, "[OPTIONS]"]
    parts = [f"# `steadygaze {name}`", command.help, fence("sh", " ".join(usage))]
    parts += ["## Examples", fence("sh", "\n".join(command.examples))]
    if arguments:
        parts += [
            "## Arguments",
            table(("argument", "meaning"), [(f"`{p.name}`", meaning(p)) for p in arguments]),
        ]
    groups: dict[str, list[tuple[str, str]]] = {}
    for option in options:
        panel = getattr(option, "rich_help_panel", None)
        title = panel if isinstance(panel, str) else "Other options"
        names = "`, `".join([*option.opts, *option.secondary_opts])
        groups.setdefault(title, []).append((f"`{names}`", meaning(option)))
    for title, rows in groups.items():
        parts += [f"## {title}", table(("option", "meaning"), rows)]
    return joined(parts)


def summary(command: Any) -> str:
    return " ".join(str(command.short_help or command.help.partition("\n\n")[0]).split())


def meaning(parameter: Any) -> str:
    text = re.sub(r"\[/?[a-z ]+\]", "", getattr(parameter, "help", "") or "")
    default = getattr(parameter, "show_default_text", None) or parameter.default
    if parameter.required:
        text += " Required."
    elif default not in (None, "", False, [], ()) and not callable(default) and "Default" not in text:
        text += f" Default: `{default}`."
    return text.replace("<", "&lt;").strip()
