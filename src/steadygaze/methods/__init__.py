"""Every attribution method, one file per family, each registered under its name.

`list_methods()` describes them, `register_method` adds one, `method(name, **options)` sets options.
"""

import sys
import warnings
from dataclasses import replace
from inspect import signature
from types import ModuleType
from typing import Any

from steadygaze.method_names import make_method, parse_method
from steadygaze.method_registry import (
    METHODS,
    Alias,
    BaseMethod,
    Method,
    MethodInfo,
    aliases,
    allowed_options,
    base_methods,
    register_alias,
    register_method,
)
from steadygaze.methods import (
    atman,
    attention,
    attnlrp,
    cam,
    channel_masks,
    contrastive,
    decomposition,
    gaze,
    gradient,
    learnt,
    perturbation,
    propagation,
    sufficient,
)
from steadygaze.notebook import Listing
from steadygaze.trace.rules import PLAIN, Rules, frozen
from steadygaze.vit.view import ViT

__all__ = [
    "METHODS",
    "Method",
    "MethodInfo",
    "aliases",
    "atman",
    "attention",
    "attnlrp",
    "base_methods",
    "cam",
    "channel_masks",
    "contrastive",
    "decomposition",
    "gaze",
    "gradient",
    "learnt",
    "list_methods",
    "method",
    "parse_method",
    "perturbation",
    "propagation",
    "register_alias",
    "register_method",
    "rules_of",
    "sufficient",
    "unavailable",
]

parse = parse_method


def method(name: str, **options: Any) -> Method:
    """A method with options, accepted wherever a method's name is.

    >>> method("attixg+plus", pairing="next", freeze=0.75).name
    'attixg+plus:freeze=0.75,pairing=next'
    """
    return make_method(name, **options)


def list_methods() -> Listing[MethodInfo]:
    """Every attribution method, base methods first, then aliases; a list that shows itself as a table.

    >>> [info.cost for info in list_methods() if info.name == "gaze_removal"]
    [2.0]
    """
    infos = [_describe_base(base) for base in base_methods()]
    infos += [_describe_alias(name, alias) for name, alias in aliases().items()]
    columns = ("name", "family", "cost", "class_specific", "summary")
    return Listing(infos, "methods", columns)


def _describe_base(base: BaseMethod) -> MethodInfo:
    return MethodInfo(
        name=base.name,
        family=base.family,
        cost=base.cost,
        class_specific=base.class_specific,
        layers=base.kind != "model",
        options=allowed_options(base, base.aggregator),
        summary=base.summary,
        score=base.score,
    )


def _describe_alias(name: str, alias: Alias) -> MethodInfo:
    target = parse_method(alias.target)
    options = allowed_options(target.base, target.aggregator) | dict(target.options)
    return replace(
        _describe_base(target.base),
        name=name,
        layers=False,
        options=options,
        summary=alias.summary or target.base.summary,
        score=alias.score,
        alias_of=alias.target,
    )


def unavailable(method: Method, vit: ViT) -> str:
    """Why `method` cannot explain this model; empty if it can.

    >>> import steadygaze as sg
    >>> vit = sg.adapt(sg.load_model("embedded").model)
    >>> unavailable(sg.method("gae"), vit), unavailable(sg.method("diffmask"), vit)[:14]
    ('', 'it needs gates')
    """
    quantised = next((m for m in vit.model.modules() if ".quantized." in f"{type(m).__module__}."), None)
    if quantised is not None and method.base.gradient:
        layer = f"{type(quantised).__module__}.{type(quantised).__name__}"
        return (
            f"no gradient passes through the model's quantised layers ({layer}). Explain the model before "
            f"quantisation, or use a method without gradients, such as rollout or occlusion."
        )
    unsupported = method.base.unsupported
    if unsupported is None:
        return ""
    read = signature(unsupported).parameters
    return unsupported(vit, **{key: value for key, value in method.options if key in read})


def rules_of(method: Method) -> Rules:
    """The rules of a method's backward pass.

    >>> import steadygaze as sg
    >>> rules_of(sg.method("gaze")).attention  # three quarters of attention are frozen
    0.25
    """
    if callable(method.base.rules):
        return method.base.rules(dict(method.options))
    if method.base.rules is not None:
        return method.base.rules
    freeze = method.option("freeze")
    freeze = method.base.freeze if freeze is None else freeze
    if freeze is None:
        return PLAIN
    return frozen(freeze, method.option("slope") or "origin", method.option("gate") or "held")


class _CallableUntilNextVersion(ModuleType):
    """`sg.methods()` was the name of `sg.list_methods()` in version 0.1."""

    def __call__(self) -> list[MethodInfo]:
        warnings.warn("sg.methods() is now sg.list_methods()", DeprecationWarning, stacklevel=2)
        return list_methods()


sys.modules[__name__].__class__ = _CallableUntilNextVersion
