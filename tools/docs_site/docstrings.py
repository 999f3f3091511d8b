"""Google-style docstrings as Markdown, for pages that mkdocstrings does not write."""

from __future__ import annotations

import inspect
import re

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ITEM = re.compile(r"^(\S[^:]*): ((?:.*)(?:\n +.*)*)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Render a docstring: paragraphs as they are, arguments as a list, examples as code."""
    return SECTION.sub(_section, inspect.cleandoc(text)).strip()


def _section(match: re.Match[str]) -> str:
    title, body = match[1], inspect.cleandoc(match[2])
    if title == "Examples":
        return f"```{'pycon' if '>>>' in body else 'python'}\n{body}\n```\n\n"
    if title == "Returns":
        return f"Returns: {body}\n\n"
    return ITEM.sub(lambda item: f"- `{item[1]}`: {' '.join(item[2].split())}", body) + "\n\n"
