"""Recipes from TOML files and from the package.

The recipes that ship with the package are in `recipes/`; each states its command, its cost and the measured
result.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput, UnknownName
from steadygaze.training.plain_values import check_plain
from steadygaze.training.recipe import Recipe

RENAMED = {
    "data.pictures": "data.images",
    "data.test_pictures": "data.test_images",
}  # keys of the first version
MAX_BYTES = 1_000_000  # of a recipe


def read_recipe(source: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, or a shipped one by name.

    changes: values by full key, such as {"data.train": "FOLDER", "seed": 1}; None removes a key

    >>> read_recipe("cifar10-tap", {"data.train": "cifar10/train", "epochs": 2}).epochs
    2
    """
    text = recipe_text(source)
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # also of integers with too many digits
        raise BadInput(f"{source} is not a readable TOML file ({error})") from error
    except RecursionError as error:
        raise BadInput(f"{source} is not a readable TOML file (nested too deeply)") from error
    return make_recipe(content, changes)


def recipe_text(source: str | Path) -> str:
    """The text of a recipe file, or of a shipped recipe."""
    path = Path(source)
    try:
        is_file = path.is_file()
        size = path.stat().st_size if is_file else 0
    except OSError as error:  # such as a name that is too long
        raise BadInput(f"{str(source)[:80]} is not a readable TOML file ({error.strerror})") from error
    if size > MAX_BYTES:
        raise BadInput(f"{source} is not a recipe: expected at most {MAX_BYTES:,} bytes, got {size:,}")
    if not is_file:
        shipped = shipped_recipes()
        if str(source) not in shipped:
            hint = "Expected a TOML file or the name of a shipped recipe."
            raise UnknownName("recipe", str(source), shipped, hint)
        return shipped[str(source)]
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise BadInput(f"{source} is not a readable TOML file ({error})") from error


def make_recipe(content: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of nested tables, with changes as for `read_recipe`."""
    if not isinstance(content, Mapping):
        raise BadInput(f"recipe: expected tables by name, got {type(content).__name__}")
    check_plain(content)
    check_plain(changes or {})
    recipe = copy.deepcopy(dict(content))
    for old, new in RENAMED.items():
        name, old_key = old.split(".")
        if isinstance(recipe.get(name), dict) and old_key in recipe[name]:
            recipe[name][new.split(".")[1]] = recipe[name].pop(old_key)
    for key, value in (changes or {}).items():
        *parents, last = RENAMED.get(key, key).split(".")
        table = recipe
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise BadInput(f"{key}: {parent} is not a table")
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return Recipe(**recipe)


def shipped_recipes() -> dict[str, str]:
    """Name -> text of each recipe in the package."""
    folder = files("steadygaze") / "training" / "recipes"
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")] if folder.is_dir() else []
    ordered = sorted(entries, key=lambda entry: entry.name)
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in ordered}
