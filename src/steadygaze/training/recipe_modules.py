"""TAP and CB of a recipe, inserted into its model.

A module whose `start` the recipe leaves open begins as the identity in trained weights, which it then does
not harm, and as in its paper in new weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.modules.base import Start
from steadygaze.training.recipe import Modules

log = logging.getLogger(__name__)
ModuleOptions = dict[str, dict[str, Any] | None]  # options of TAP and CB by name; None: without it


def insert_modules(
    model: nn.Module, recipe: Modules, default_start: Start, reason_for_default: str
) -> tuple[nn.Module, ModuleOptions]:
    """(the model with the recipe's modules, their options with `start`).

    Modules that the weights brought are kept, and must have the recipe's options.
    """
    from steadygaze import modules

    kinds = {"tap": (modules.TAP, modules.TokenPool), "cb": (modules.CB, modules.ContextBroadcast)}
    options: ModuleOptions = recipe.model_dump()
    new = {}
    for name, given in options.items():
        if given is None:
            continue
        spec_class, module_class = kinds[name]
        present = [m for m in modules.inserted(model).values() if isinstance(m, module_class)]
        if "start" in given:
            start, reason = given["start"], "set by the recipe"
        elif present:
            start, reason = present[0].spec.get("start", "paper"), "of the initial weights"
        elif given.get("init"):  # Λ of CB_S is not 0: the outputs change, whatever the weights
            start, reason = "paper", "modules.cb.init is set"
        else:
            start, reason = default_start, reason_for_default
        options[name] = {**given, "start": start}
        spec = _module_spec(name, spec_class, options[name] or {})
        if present:
            _check_same_module(model, name, spec)
        else:
            new[name] = spec
            log.info("modules.%s.start = %r: %s", name, start, reason)
    return (modules.insert(model, **new) if new else model), options


def check_module_options(recipe: Modules) -> None:
    """`BadInput` or `UnknownName` for options that TAP and CB do not have, before a model is built."""
    from steadygaze import modules

    for name, spec_class in (("tap", modules.TAP), ("cb", modules.CB)):
        options = getattr(recipe, name)
        if options is not None:
            _module_spec(name, spec_class, options)


def _module_spec(name: str, spec: Any, options: Mapping[str, Any]) -> Any:
    """TAP or CB with the recipe's options."""
    known = [f.name for f in fields(spec)]
    for key in options:
        if key not in known:
            raise UnknownName(f"option of modules.{name}", key, known)
    try:
        return spec(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        )
    except TypeError as error:
        raise BadInput(f"modules.{name}: {error}") from error


def _check_same_module(model: nn.Module, name: str, spec: Any) -> None:
    """`BadInput` unless the module that the weights brought is the one of the recipe."""
    from steadygaze import modules

    requested = _module_texts(modules.insert(modules.remove(model), **{name: spec}), name)
    existing = _module_texts(model, name)
    if requested != existing:
        raise BadInput(
            f"modules.{name}: the weights contain it already, with other options: expected "
            f"{sorted(existing.items())}, got {sorted(requested.items())}. "
            f"Leave modules.{name} out to keep theirs."
        )


def _module_texts(model: nn.Module, name: str) -> dict[str, str]:
    """Where a model has TAP or CB, and with which options."""
    from steadygaze import modules
    from steadygaze.modules.base import describe

    return {
        path: describe(module.spec)
        for path, module in modules.inserted(model).items()
        if path.rpartition(".")[2].startswith(name)
    }
