"""Google-style docstrings as Markdown, for pages that mkdocstrings does not write."""

from __future__ import annotations

import inspect

from griffe import Docstring, DocstringSectionKind

LISTS = (DocstringSectionKind.parameters, DocstringSectionKind.attributes, DocstringSectionKind.raises)


def to_markdown(text: str) -> str:
    """Render a docstring: paragraphs as they are, arguments as a list, examples as code.

    >>> print(to_markdown("Double it.\\n\\nArgs:\\n    x: A number.\\n\\nExamples:\\n    >>> f(1)\\n    2"))
    Double it.
    <BLANKLINE>
    - `x`: A number.
    <BLANKLINE>
    ```pycon
    >>> f(1)
    2
    ```
    """
    parts = []
    for section in Docstring(inspect.cleandoc(text)).parse("google", warnings=False):
        if section.kind is DocstringSectionKind.text:
            parts.append(section.value)
        elif section.kind in LISTS:
            parts.append("\n".join(f"- `{item.name}`: {item.description}" for item in section.value))
        elif section.kind is DocstringSectionKind.returns:
            parts.append("\n".join(f"Returns {item.description}" for item in section.value))
        elif section.kind is DocstringSectionKind.examples:
            for kind, example in section.value:
                is_code = kind is DocstringSectionKind.examples
                parts.append(f"```pycon\n{example}\n```" if is_code else example)
    return "\n\n".join(parts)
