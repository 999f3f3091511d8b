"""Recipes from TOML: unknown keys, values of another kind and weights below zero are refused with the key's full name.

The recipes that ship with the package lie in `recipes/`; each says its command, its cost and the result that was measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from steadygaze.errors import BadInput, UnknownName
from steadygaze.training.recipe import Recipe


def read_recipe(source: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a TOML file, or of a shipped recipe's name; `changes` such as {"data.train": "FOLDER", "seed": 1}."""
    path = Path(source)
    known = {} if path.is_file() else shipped()
    if not path.is_file() and str(source) not in known:
        raise UnknownName(
            "recipe", str(source), known, "It is neither a file nor a recipe of `steadygaze train --list`."
        )
    try:
        content = tomllib.loads(known.get(str(source)) or path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadInput(f"{source} is no TOML that can be read ({error})") from error
    return make_recipe(content, changes)


def make_recipe(content: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a nested dict."""
    tree = _copied(content)
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            if not isinstance(place.setdefault(parent, {}), dict):
                raise BadInput(f"{key}: {parent} is no table")
            place = place[parent]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return _read(Recipe, tree, "")


def shipped() -> dict[str, str]:
    """Name -> text of each recipe inside the package."""
    folder = files("steadygaze") / "training" / "recipes"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")] if folder.is_dir() else []
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(found, key=lambda e: e.name)
    }


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`, or an error that names the key."""
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise BadInput(
                f"{where}: expected a table of {', '.join(f.name for f in fields(kind))}, got {value!r}"
            )
        known = {f.name: f for f in fields(kind)}
        hints = get_type_hints(kind)
        for key in value:
            if key not in known:
                raise UnknownName(
                    "key", f"{where}.{key}" if where else key, [f"{where}.{k}" if where else k for k in known]
                )
        for key, f in known.items():
            if key not in value and f.default is MISSING and f.default_factory is MISSING:
                raise BadInput(f"{where + '.' if where else ''}{key}: missing from the recipe")
        return kind(**{k: _read(hints[k], v, f"{where}.{k}" if where else k) for k, v in value.items()})  # type: ignore[operator]
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _read(next(k for k in inside if k is not NoneType), value, where)
    if origin is Literal:
        if value not in inside:
            raise UnknownName(where, str(value), inside)
        return value
    if origin is list:
        if not isinstance(value, list):
            raise BadInput(f"{where}: expected a list, got {value!r}")
        return [_read(inside[0], v, where) for v in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise BadInput(f"{where}: expected a table, got {value!r}")
        return dict(value)
    return _plain(kind, value, where)


def _plain(kind: type, value: Any, where: str) -> Any:
    said = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadInput(f"{where}: expected {said[kind]}, got {value!r}")
    return value
