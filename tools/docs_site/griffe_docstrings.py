"""griffe extension: signatures and docstrings with arguments that are declared elsewhere."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from griffe import Extension, Parameter, ParameterKind, Parameters

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: ParameterKind.var_keyword,
}


class Docstrings(Extension):
    """Fills in the options of `verify` and `stress`, which their requests declare."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is None or "{options}" not in obj.docstring.value:
            return
        function = getattr(import_module(obj.module.path), obj.name)
        obj.docstring.value = inspect.getdoc(function) or ""
        obj.parameters = Parameters(*map(_parameter, inspect.signature(function).parameters.values()))


def _parameter(parameter: inspect.Parameter) -> Parameter:
    empty, hint = inspect.Parameter.empty, parameter.annotation
    annotation = None if hint is empty else hint if isinstance(hint, str) else inspect.formatannotation(hint)
    default = None
    if parameter.default is not empty:
        default = getattr(parameter.default, "__name__", repr(parameter.default))
    return Parameter(parameter.name, annotation=annotation, kind=KINDS[parameter.kind], default=default)
