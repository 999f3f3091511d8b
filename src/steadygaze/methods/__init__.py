"""Every attribution method, registered under its name. Calling the package, `steadygaze.methods()`, lists them."""

import sys
from types import ModuleType
from typing import Any

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
from steadygaze.method_registry import Method, MethodInfo, infos, make, parse

__all__ = [
    "Method",
    "MethodInfo",
    "attention",
    "cam",
    "decomposition",
    "diffmask",
    "gaze",
    "gradient",
    "method",
    "parse",
    "perturbation",
    "perturbation_soft",
    "propagation",
    "sufficient",
]  # fmt: skip


def method(name: str, **options: Any) -> Method:
    """A method with options, accepted wherever a name is.

    >>> method("attixg+plus", pairing="next", freeze=0.75).name
    'attixg+plus:freeze=0.75,pairing=next'
    """
    return make(name, **options)


def listed() -> list[MethodInfo]:
    """What there is: every method with its family, cost and options."""
    return infos()


class _Listed(ModuleType):
    """`sg.methods` is this package and, called, the list of what it holds."""

    def __call__(self) -> list[MethodInfo]:
        return listed()


sys.modules[__name__].__class__ = _Listed
