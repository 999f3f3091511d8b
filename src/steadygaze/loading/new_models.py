"""Arguments of a model that is built anew, from a recipe that somebody else may have written: known names,
bounded numbers, and a size that fits into memory, all checked before memory is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from steadygaze.errors import BadInput, UnknownName
from steadygaze.loading.timm_models import HUB_PREFIXES, constructor_arguments, number_of_elements

MAX_SIDE = 4096  # of images and patches
MAX_REPEATS = 1000  # of blocks and stages
MAX_WIDTH = 65_536  # of layers, and every other integer
MAX_FLOAT = 1024.0
REPEATS = ("depth", "layer", "block", "stage")  # in names of arguments that repeat parts of a model
BYTES = 4  # of an element, in float32


def check_new_model(name: str, num_classes: int | None, arguments: Mapping[str, Any]) -> None:
    """`BadInput` unless timm's constructor takes the arguments and the model fits into this machine's memory.

    Names of the hub are not checked: their constructor is known after a download only.
    """
    if name.startswith(HUB_PREFIXES):
        return
    known = constructor_arguments(name)
    for key in arguments:
        if key not in known:
            raise UnknownName(f"argument of {name} in model.arguments", key, known)
    for key, value in _numbers(arguments):
        limit = _limit(key, value)
        if abs(value) > limit:
            raise BadInput(f"arguments: {key}: expected a number of at most {limit:,}, got {value:,}")
    classes = {} if num_classes is None else {"num_classes": num_classes}
    try:
        elements = number_of_elements(name, **classes, **arguments)
    except Exception as error:  # of constructors that were given odd values
        reason = f"{name} cannot be built with {dict(arguments)} ({type(error).__name__}: {error})"
        raise BadInput(f"arguments: {reason}") from error
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
    if elements * BYTES > memory:
        raise BadInput(
            f"arguments: {name} with {dict(arguments)} has {elements:,} elements, "
            f"{elements * BYTES / 2**30:,.0f} GB in float32; this machine has "
            f"{memory / 2**30:,.0f} GB. Use a smaller model."
        )


def _limit(key: str, value: float) -> float:
    if isinstance(value, float):
        return MAX_FLOAT
    if "size" in key:
        return MAX_SIDE
    return MAX_REPEATS if any(word in key for word in REPEATS) else MAX_WIDTH


def _numbers(arguments: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of the arguments, also inside of lists, with the name of its argument."""
    for key, value in arguments.items():
        rest = [value]
        while rest:
            item = rest.pop()
            if isinstance(item, (list, tuple)):
                rest.extend(item)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                yield key, item
