"""griffe extension: docstrings whose arguments are declared elsewhere, as they are at run time."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from griffe import Extension


class Docstrings(Extension):
    """Fills in the options of `verify` and `stress`, which their requests declare."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None and "{options}" in obj.docstring.value:
            function = getattr(import_module(obj.module.path), obj.name)
            obj.docstring.value = inspect.getdoc(function) or ""
