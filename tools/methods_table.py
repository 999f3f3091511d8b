"""Write the table of methods in docs/methods.md from the registry: python tools/methods_table.py."""

import sys
from pathlib import Path

import steadygaze as sg

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
HEAD = "| name | family | cost in forwards | class | layers | score | options (defaults) | what it is |"


def table() -> str:
    """The table as Markdown, one row for each method."""
    lines = [HEAD, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for info in sg.list_methods():
        name = f"`{info.name}`" if info.alias_of is None else f"`{info.name}` = `{info.alias_of}`"
        values = ((key, str(value).lower()) for key, value in info.options.items())
        options = ", ".join(f"`{key}={value}`" for key, value in values)
        flags = ["yes" if flag else "" for flag in (info.class_specific, info.layers)]
        cells = [name, info.family, f"{info.cost:g}", *flags, info.score, options, info.summary]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replaced(page: str) -> str:
    """The page with its table of methods made again."""
    lines = page.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| name | family |"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:first], table(), *lines[last:]]) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(replaced(page), encoding="utf-8")
    elif replaced(page) != page:
        sys.exit(
            "docs/methods.md: the table of methods is not that of the registry. Run this without --check."
        )
