"""Docstrings of the package as Markdown: examples become code, and lists of arguments become lists.

name: meaning, perhaps           - `name`: meaning, perhaps
    on several lines        ->     on several lines
>>> f(1)                         ```python
2                                >>> f(1)
                                 2
                                 ```
"""

from __future__ import annotations

import inspect
import re

ARGUMENT = re.compile(r"^((?:[*]{0,2}\w+)(?:, [*]{0,2}\w+)*): +(\S.*)$")


def to_markdown(text: str) -> str:
    """A docstring as Markdown; tables, lists and paragraphs stay as they are."""
    lines = inspect.cleandoc(text).split("\n")
    result: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.lstrip().startswith(">>> "):
            block: list[str] = []
            while i < len(lines) and lines[i].strip():
                block.append(lines[i])
                i += 1
            result += ["", *_fenced(block, "pycon"), ""]
            continue
        if line.startswith("    ") and _starts_a_block(result):
            block = []
            while i < len(lines) and (
                lines[i].startswith("    ") or (not lines[i].strip() and _more(lines, i))
            ):
                block.append(lines[i])
                i += 1
            result += ["", *_fenced(block, "text"), ""]
            continue
        match = ARGUMENT.match(line)
        if match and match[1].lower() not in ("example", "note", "formulas", "formula", "source"):
            if result and result[-1].strip() and not result[-1].startswith(("- ", "  ")):
                result.append("")
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            result.append(f"- {names}: {match[2]}")
            i += 1
            while i < len(lines) and lines[i].startswith("  "):
                result.append("    " + lines[i].strip())
                i += 1
            continue
        if line.startswith("|") and result and result[-1].strip() and not result[-1].startswith("|"):
            result.append("")
        if (
            result
            and result[-1].startswith(("- ", "    "))
            and line.strip()
            and not line.startswith(("-", " "))
        ):
            result.append("")
        result.append(line)
        i += 1
    return _tables(re.sub(r"\n{3,}", "\n\n", "\n".join(result)).strip())


def _fenced(block: list[str], language: str) -> list[str]:
    return [f"```{language}", *inspect.cleandoc("\n".join(block)).split("\n"), "```"]


def _starts_a_block(result: list[str]) -> bool:
    """Whether an indented line is code: after an empty line that does not follow a list."""
    if not result or result[-1].strip():
        return False
    before = [line for line in result if line.strip()]
    return not (before and before[-1].startswith(("- ", "    ")))


def _more(lines: list[str], i: int) -> bool:
    rest = [line for line in lines[i:] if line.strip()]
    return bool(rest) and rest[0].startswith("    ")


def _tables(text: str) -> str:
    """Add the line below the head of tables that have none."""
    lines = text.split("\n")
    result = []
    for i, line in enumerate(lines):
        result.append(line)
        first = line.startswith("|") and (i == 0 or not lines[i - 1].startswith("|"))
        if (
            first
            and i + 1 < len(lines)
            and lines[i + 1].startswith("|")
            and not re.match(r"^\|[ :-]+\|", lines[i + 1])
        ):
            result.append("| " + " | ".join(["---"] * (line.count("|") - 1)) + " |")
    return "\n".join(result)
