"""A sweep, and the recipes that it expands to.

A sweep file names a recipe, and lists under `[grid]` the values of each key; every combination is a cell, and
every cell is trained once for each seed. `[set]` holds values that all cells share, `[measure]` changes the
recipe's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pydantic import Field

from steadygaze.errors import InputError
from steadygaze.training.recipe import (
    Document,
    Measure,
    PositiveInt,
    Recipe,
    check_plain,
    read_recipe,
    refuse_commands,
)
from steadygaze.training.recipe_files import parse_toml, parse_value, recipe_text

MAX_RUNS = 10_000
MAX_NAME = 100  # characters of a cell's folder
WITHOUT = "none"  # as the value of modules.NAME or losses.NAME: leave it out
UNSAFE = re.compile(r"[^A-Za-z0-9_.=+-]+")  # in a folder's name; a comma separates folders in compare-models


@dataclass(frozen=True)
class Cell:
    """One combination of values.

    Attributes:
        changes: Values that change the recipe, by full key.
        label: Name in tables.
        folder: Name of its folder.
    """

    changes: Mapping[str, Any]
    label: str
    folder: str


class Sweep(Document):
    """What a sweep file holds.

    Attributes:
        recipe: A TOML file, or the name of a shipped recipe.
        grid: Values of each key that is swept.
        set: Values that all cells share.
        measure: Changes of the recipe's `[measure]`.
        seeds: Number of seeds of each cell.
    """

    recipe: str
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    measure: Measure | None = None
    seeds: PositiveInt = 1
    about: str = ""
    command: str = ""
    cost: str = ""
    result: str = "not measured yet"
    _allow_pipe: bool = False  # in the recipe; not a key of the file

    def cells(self) -> list[Cell]:
        """Every combination of the grid's values, in the order of the keys; one cell without a grid."""
        for key, values in self.grid.items():
            if not values:
                raise InputError(f"grid: expected at least one value of {key}, got none")
            if key.partition(".")[0] in ("seed", "measure"):
                raise InputError(f"grid: {key} cannot be swept. Give the number of seeds by --seeds.")
        count = self.seeds * prod(map(len, self.grid.values()))
        if count > MAX_RUNS:
            raise InputError(f"expected a grid of at most {MAX_RUNS:,} runs, got {count:,}")
        cells = [_cell(list(self.grid), values) for values in product(*self.grid.values())]
        folders = [cell.folder for cell in cells]
        twice = next((folder for folder in folders if folders.count(folder) > 1), None)
        if twice is not None:
            raise InputError(f"grid: expected different values, got {twice} twice")
        return cells

    def recipe_of(self, cell: Cell, number: int = 0) -> Recipe:
        """The recipe of a cell with its seed of this number, checked."""
        measure = {} if self.measure is None else self.measure.model_dump(exclude_unset=True)
        changes = {**{f"measure.{key}": value for key, value in measure.items()}, **self.set, **cell.changes}
        for key, value in changes.items():
            table, _, name = key.partition(".")
            if value == WITHOUT and table in ("modules", "losses") and name and "." not in name:
                changes[key] = None
        recipe = read_recipe(self.recipe, changes, allow_pipe=self._allow_pipe)
        return recipe.model_copy(update={"seed": recipe.seed + number})


def _cell(keys: Sequence[str], values: Sequence[Any]) -> Cell:
    lasts = [key.rpartition(".")[2] for key in keys]
    short = keys if len(set(lasts)) < len(lasts) else lasts
    texts = [value_text(value) for value in values]
    label = ", ".join(f"{key}={text}" for key, text in zip(short, texts, strict=True))
    changes = dict(zip(keys, values, strict=True))
    folder = "+".join(f"{key}={text}" for key, text in zip(keys, texts, strict=True))
    if UNSAFE.search(folder) or len(folder) > MAX_NAME:
        digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
        folder = f"{UNSAFE.sub('-', folder)[:MAX_NAME].strip('-')}-{digest}"
    return Cell(changes, label or "recipe", folder or "recipe")


def value_text(value: Any) -> str:
    """A value of a recipe for people.

    Examples:
        >>> value_text(0.5), value_text([0, 3]), value_text({"branches": 2})
        ('0.5', '[0, 3]', '{branches=2}')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={value_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_sweep(
    source: str | Path,
    values: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | None = None,
    *,
    allow_pipe: bool = False,
) -> Sweep:
    """A sweep file, a shipped sweep, or a recipe, with further values.

    Args:
        values: By full key; several of a key are swept, one is set. They replace those of the file.
        allow_pipe: Accept data in the files that runs a shell command (`wds:pipe:...`). In `values` it is
            always accepted.
    """
    content = parse_toml(recipe_text(source, "sweep", "recipe"), source)
    if "grid" not in content and "recipe" not in content:  # a recipe: a sweep without a grid
        content = {"recipe": str(source)}
    check_plain(content)
    check_plain(dict(values or {}))
    if not allow_pipe:
        given = {f"{table}.{key}" for table in ("grid", "set") for key in values or {}}
        refuse_commands(content, given | set(values or {}))
    grid, fixed = dict(content.get("grid", {})), dict(content.get("set", {}))
    for key, listed in (values or {}).items():
        grid.pop(key, None)
        fixed.pop(key, None)
        if len(listed) == 1:
            fixed[key] = listed[0]
        else:
            grid[key] = list(listed)
    content |= {"grid": grid, "set": fixed}
    if seeds is not None:
        content["seeds"] = seeds
    sweep = Sweep(**content)
    sweep._allow_pipe = allow_pipe
    return sweep


def parse_grid(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Values by key from key=value,value: TOML, a word without quotes is a string.

    Commas inside brackets, braces and quotes do not separate values.

    Examples:
        >>> parse_grid(["losses.adl.tau=1,2.5", "data.images=[0, 3],[0, 6]", "optimizer.betas=[0.9, 0.95]"])
        {'losses.adl.tau': [1, 2.5], 'data.images': [[0, 3], [0, 6]], 'optimizer.betas': [[0.9, 0.95]]}
        >>> parse_grid(["modules.tap=none,{branches = 2}", "about='a, b'"])
        {'modules.tap': ['none', {'branches': 2}], 'about': ['a, b']}
    """
    values: dict[str, list[Any]] = {}
    for text in settings:
        key, separator, listed = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"--set: expected KEY=VALUE or KEY=VALUE,VALUE,..., got {text!r}")
        pieces = _split(listed)
        if len(pieces) > 1 and not all(pieces):
            raise InputError(f"--set: expected a value on each side of a comma, got {text!r}")
        values[key.strip()] = [parse_value(piece) for piece in pieces]
    return values


def _split(text: str) -> list[str]:
    """The pieces between commas that are outside brackets and quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces] if len(pieces) > 1 else [text]
