"""griffe extension: docstrings of the package as Markdown, before mkdocstrings renders them."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from griffe import Extension

from tools.docs_site.docstrings import to_markdown


class Docstrings(Extension):
    """Turns examples into code and argument lists into lists."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None and "{options}" in obj.docstring.value:  # filled in at run time
            function = getattr(import_module(obj.module.path), obj.name)
            obj.docstring.value = inspect.getdoc(function) or ""
        if obj.docstring is not None:
            first, _, rest = obj.docstring.value.partition("\n")
            obj.docstring.value = f"{first}\n\n{to_markdown(rest)}".strip()
