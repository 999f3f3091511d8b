"""What users state about a model: class names, image size, normalization, arguments of its constructor.

Arguments may come from a recipe or a file that somebody else has written: names are known, numbers bounded,
and the model fits into memory, all checked before memory is allocated.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.loading.timm import (
    HUB_PREFIXES,
    constructor_arguments,
    is_timm_name,
    number_of_elements,
    without_prefix,
)
from steadygaze.untrusted import parse_json, read_text

MAX_SIDE = 4096  # of images and patches
MAX_REPEATS = 1000  # of blocks and stages
MAX_WIDTH = 65_536  # of layers, and every other integer
MAX_FLOAT = 1024.0
REPEATS = ("depth", "layer", "block", "stage")  # in names of arguments that repeat parts of a model
BYTES = 4  # of an element, in float32
COPIES = 2  # in training: weights and gradients, at least


def check_new_model(name: str, num_classes: int | None, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` unless timm's constructor takes the arguments and the model fits into memory.

    Names of the hub are not checked: their constructor is known after a download only.
    """
    if name.startswith(HUB_PREFIXES):
        return
    known = constructor_arguments(name)
    for key in arguments:
        if key not in known:
            raise UnknownNameError(f"argument of {name} in model.arguments", key, known)
    for key, value in numbers_in(arguments):
        limit = number_limit(key, value, repeats=MAX_REPEATS, width=MAX_WIDTH)
        if abs(value) > limit:
            raise InputError(f"arguments: {key}: expected a number of at most {limit:,}, got {value:,}")
    classes = {} if num_classes is None else {"num_classes": num_classes}
    try:
        elements = number_of_elements(name, **classes, **arguments)
    except Exception as error:  # of constructors that were given odd values
        reason = f"{name} cannot be built with {dict(arguments)} ({type(error).__name__}: {error})"
        raise InputError(f"arguments: {reason}") from error
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
    if elements * BYTES * COPIES > memory:
        raise InputError(
            f"arguments: {name} with {dict(arguments)} has {elements:,} elements, "
            f"{elements * BYTES * COPIES / 2**30:,.0f} GB with their gradients in float32; this machine has "
            f"{memory / 2**30:,.0f} GB. Use a smaller model."
        )


def number_limit(key: str, value: float, *, repeats: int, width: int) -> float:
    """The largest magnitude of an argument of this name; repeats: of blocks, width: of layers."""
    if isinstance(value, float):
        return MAX_FLOAT
    if "size" in key:
        return MAX_SIDE
    return repeats if any(word in key for word in REPEATS) else width


def numbers_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of the arguments, also inside of lists, with the name of its argument."""
    for key, value in arguments.items():
        rest = [value]
        while rest:
            item = rest.pop()
            if isinstance(item, (list, tuple)):
                rest.extend(item)
            elif isinstance(item, int | float) and not isinstance(item, bool):
                yield key, item


ClassNames = str | Path | Sequence[str]
ImageSize = int | Sequence[int]


def read_class_names(class_names: ClassNames) -> tuple[str, ...]:
    """Names in the order of the classes: a sequence, or a file: one name a line, or a JSON list or dict."""
    if not isinstance(class_names, (str, Path)):
        return tuple(str(name) for name in class_names)
    path = Path(class_names)
    try:
        text = read_text(path)
        content = parse_json(text.encode()) if path.suffix == ".json" else text.splitlines()
    except ValueError as error:
        raise InputError(
            f"{path}: expected a file of class names, one name per line or JSON ({error})",
            option="class_names",
        ) from error
    if isinstance(content, dict):
        content = _in_order(content, path)
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise InputError(
            f"{path}: expected a JSON list of names, or a dict of index to name", option="class_names"
        )
    names = [name.strip() for name in content]
    while names and not names[-1]:
        names.pop()
    if not names:
        raise InputError(f"{path}: expected class names, got an empty file", option="class_names")
    return tuple(names)


def _in_order(content: dict[str, Any], path: Path) -> list[Any]:
    """The values by index: {"0": "cat", "1": "dog"}, or {"cat": 0, "dog": 1}."""
    if all(isinstance(value, int) for value in content.values()):
        content = {str(index): name for name, index in content.items()}
    expected = [str(index) for index in range(len(content))]
    if sorted(content) != sorted(expected):
        raise InputError(
            f"{path}: expected the indices 0..{len(content) - 1}, each once, got "
            f"{', '.join(list(content)[:5])}",
            option="class_names",
        )
    return [content[index] for index in expected]


def image_size_pair(size: ImageSize) -> tuple[int, int]:
    """(height, width).

    Examples:
        >>> image_size_pair(224), image_size_pair((224, 320))
        ((224, 224), (224, 320))
    """
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise InputError(
            f"expected an image size such as 224 or (224, 320), got {size!r}", option="image_size"
        )
    return pair[0], pair[1]


def overridden(
    preprocess: Preprocess | None,
    image_size: ImageSize | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Preprocess | None:
    """The preprocessing with what was stated; None if it is not known."""
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) != 3:
            raise InputError(f"expected three numbers, one for each channel, got {list(values)}", option=name)
        if values is not None and not all(isfinite(v) and (name == "mean" or v > 0) for v in values):
            kind = "numbers" if name == "mean" else "numbers above 0"
            raise InputError(f"{name}: expected three {kind}, got {list(values)}", option=name)
    size = None if image_size is None else image_size_pair(image_size)
    normalization = {
        name: list(values) for name, values in (("mean", mean), ("std", std)) if values is not None
    }
    if preprocess is not None and size is not None and size != preprocess.size:
        preprocess = preprocess.override(size=size)
    if preprocess is None or not normalization:
        return preprocess
    return replace(preprocess, config={**preprocess.config, **normalization})


def stated_preprocess(
    image_size: ImageSize | None, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Preprocess | None:
    """The preprocessing of a model whose library describes none; None if no image size is stated."""
    if image_size is None:
        return None
    for name, values in (("mean", mean), ("std", std)):
        if values is None:
            raise InputError(
                f"{name}: expected the normalization of the model's images, which it does not carry. If it "
                "normalizes them itself, mean=(0, 0, 0) and std=(1, 1, 1)",
                option=name,
            )
    return overridden(Preprocess.resize_and_crop(image_size_pair(image_size)), None, mean, std)


def constructor_options(
    name: str, model_kwargs: Mapping[str, Any] | None, image_size: ImageSize | None
) -> dict[str, Any]:
    """Arguments of the constructor: those given, and the image size where a timm model takes one."""
    arguments = dict(model_kwargs or {})
    timm_name = without_prefix(name)
    if image_size is None or "img_size" in arguments or timm_name.startswith(HUB_PREFIXES):
        return arguments
    if is_timm_name(timm_name) and "img_size" in constructor_arguments(timm_name):
        arguments["img_size"] = image_size_pair(image_size)
    return arguments


def parse_model_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs, as timm's scripts take them; values are Python literals, or else text.

    Examples:
        >>> parse_model_kwargs(["img_size=320", "global_pool=avg", "qk_norm=True"])
        {'img_size': 320, 'global_pool': 'avg', 'qk_norm': True}
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise InputError(f"expected KEY=VALUE, such as img_size=320, got {text!r}", option="model_kwargs")
        try:
            arguments[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key.strip()] = value
    return arguments
