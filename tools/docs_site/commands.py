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
    text, examples = split_examples("\n".join(filter(None, (command.help, command.epilog))))
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(["steadygaze", name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
    parts = [f"# `steadygaze {name}`", text, fence("sh", usage)]
    parts += ["## Examples", fence("sh", "\n".join(examples or [f"steadygaze {name}"]))]
    parts += [
        "## Arguments",
        table(("argument", "meaning"), [(f"`{p.name}`", meaning(p)) for p in arguments]),
    ]
    rows = [("`" + "`, `".join([*p.opts, *p.secondary_opts]) + "`", meaning(p)) for p in options]
    parts += ["## Options", table(("option", "meaning"), rows)]
    if not arguments:
        parts = [part for part in parts if part not in ("## Arguments", "None.")]
    return joined(parts)


def split_examples(text: str) -> tuple[str, list[str]]:
    """Help without its examples, and the examples: lines that begin with a command, or with `Example:`."""
    text = re.sub(r"\[/?[a-z ]+\]", "", text.replace("\b", ""))
    words: list[str] = []
    examples: list[str] = []
    for line in text.splitlines():
        command = re.match(r"^\s*(?:Example: |\$ )?((?:steadygaze|accelerate launch) .*)$", line)
        if command:
            examples.append(command[1])
        elif not re.match(r"^\s*Examples?:?\s*$", line):
            words.append(line.strip())
    return "\n".join(words).strip(), examples


def summary(command: Any) -> str:
    return str(command.short_help or split_examples(command.help or "")[0].partition("\n")[0])


def meaning(parameter: Any) -> str:
    text = re.sub(r"\[/?[a-z ]+\]", "", getattr(parameter, "help", "") or "")
    default = getattr(parameter, "show_default_text", None) or parameter.default
    if parameter.required:
        text += " Required."
    elif default not in (None, "", False, [], ()) and not callable(default) and "Default" not in text:
        text += f" Default: `{default}`."
    return text.replace("<", "&lt;").strip()
