"""What a recipe may hold, whoever wrote it: names, and numbers, text and lists of limited size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steadygaze.errors import BadInput

MAX_DEPTH = 8  # tables and lists inside one another
MAX_TEXT = 10_000  # characters
MAX_LENGTH = 10_000  # of a list or table
MAX_INTEGER = 2**63 - 1


def check_plain(value: Any, key: str = "", depth: int = 0) -> None:
    """`BadInput` for text with null characters, numbers that are not finite, and values that are too large.

    Types are left to the recipe's tables.
    """
    name = key or "recipe"
    if depth > MAX_DEPTH:
        raise BadInput(f"{name[:80]}: nested too deeply, expected at most {MAX_DEPTH} levels")
    if isinstance(value, str):
        if "\0" in value or len(value) > MAX_TEXT:
            reason = "a null character" if "\0" in value else f"{len(value):,} characters"
            raise BadInput(f"{name}: expected text of at most {MAX_TEXT:,} characters, got {reason}")
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise BadInput(f"{name}: expected an integer of at most 64 bits, got one of {value.bit_length()}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput(f"{name}: expected a finite number, got {value!r}")
    elif isinstance(value, (Mapping, list, tuple)):
        _check_entries(value, key, depth)


def _check_entries(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...], key: str, depth: int) -> None:
    if len(value) > MAX_LENGTH:
        raise BadInput(f"{key or 'recipe'}: expected at most {MAX_LENGTH:,} entries, got {len(value):,}")
    if not isinstance(value, Mapping):
        for number, entry in enumerate(value):
            check_plain(entry, f"{key}[{number}]", depth + 1)
        return
    for name, entry in value.items():
        if not isinstance(name, str):
            raise BadInput(f"{key or 'recipe'}: expected names as keys, got {name!r}")
        check_plain(name, key, depth)
        check_plain(entry, f"{key}.{name}" if key else name, depth + 1)


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options, if their values are numbers, strings, true or false, or lists of them; else `BadInput`."""
    for name, value in options.items():
        rest = [value]
        while rest:
            entry = rest.pop()
            if isinstance(entry, (list, tuple)):
                rest.extend(entry)
            elif not isinstance(entry, (bool, int, float, str)):
                raise BadInput(
                    f"{name}: expected a number, a string, true, false or a list of them, "
                    f"got {type(entry).__name__}"
                )
    return options
