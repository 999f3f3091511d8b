"""Errors about a recipe, from pydantic's: by the full name of the key, with the nearest known one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from steadygaze.errors import BadInput, SteadygazeError, UnknownName

EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
BOUNDS = {
    ("ge", 0): "a number of at least 0",
    ("gt", 0): "a number above 0",
    ("le", 1): "a share between 0 and 1",
    ("lt", 1): "a share between 0 and 1",
}


def explain_validation_error(
    error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> SteadygazeError:
    """The first problem that pydantic found, as an error of this package.

    model: the class that was validated; prefix: full name of its table in the recipe
    """
    first = error.errors()[0]
    key = full_key(first["loc"], prefix)
    kind, value = first["type"], first["input"]
    context = first.get("ctx", {})
    if isinstance(context.get("error"), SteadygazeError):  # raised by a check of ours
        return context["error"]
    if kind == "extra_forbidden":
        parents = first["loc"][:-1]
        known = [full_key((*parents, name), prefix) for name in _fields_at(model, parents)]
        return UnknownName("key", key, known)
    if kind == "missing":
        return BadInput(f"{key}: missing from the recipe")
    if kind == "literal_error":
        return UnknownName(key, str(value), _literals(context["expected"]))
    return BadInput(f"{key}: {_expectation(first, kind)}, got {value!r}")


def full_key(location: Sequence[str | int], prefix: str = "") -> str:
    """The name of a key as `--set` takes it.

    >>> full_key(("data", "std", 1))
    'data.std[1]'
    """
    key = prefix
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}" if key else part
    return key


def _expectation(details: ErrorDetails, kind: str) -> str:
    if kind == "expected":  # raised by a validator of ours
        return details["msg"]
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}"
    for bound in details.get("ctx", {}).items():
        if bound in BOUNDS:
            return f"expected {BOUNDS[bound]}"
        if bound[0] == "le":
            return f"expected a number of at most {bound[1]:,}"
    return details["msg"]


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Keys of the table at a location."""
    table: Any = model
    for part in location:
        table = table.model_fields[str(part)].annotation
    return list(table.model_fields)


def _literals(expected: str) -> list[str]:
    """'a', 'b' or 'c' -> [a, b, c]."""
    return [part.strip("' ") for part in expected.replace(" or ", ", ").split(", ")]
