"""Every attribution method, one file per family, each registered under its name.

`list_methods()` describes them, `register_method` adds one from outside, `method(name, **options)` sets options.
"""

import sys
from types import ModuleType
from typing import Any

from steadygaze.method_registry import (
    METHODS,
    Method,
    MethodInfo,
    aliases,
    base_methods,
    list_methods,
    make_method,
    parse_method,
    register_alias,
    register_method,
)
from steadygaze.methods import (
    attention,
    cam,
    decomposition,
    diffmask,
    gaze,
    gradient,
    perturbation,
    perturbation_soft,
    propagation,
    sufficient,
)

__all__ = [
    "METHODS",
    "Method",
    "MethodInfo",
    "aliases",
    "attention",
    "base_methods",
    "cam",
    "decomposition",
    "diffmask",
    "gaze",
    "gradient",
    "list_methods",
    "method",
    "parse_method",
    "perturbation",
    "perturbation_soft",
    "propagation",
    "register_alias",
    "register_method",
    "sufficient",
]

parse, listed = parse_method, list_methods


def method(name: str, **options: Any) -> Method:
    """A method with options, accepted wherever a method's name is.

    >>> method("attixg+plus", pairing="next", freeze=0.75).name
    'attixg+plus:freeze=0.75,pairing=next'
    """
    return make_method(name, **options)


class _Callable(ModuleType):
    def __call__(self) -> list[MethodInfo]:
        return list_methods()


sys.modules[__name__].__class__ = _Callable
