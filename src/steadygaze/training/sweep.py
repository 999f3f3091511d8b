"""A sweep, and the recipes that it expands to.

A sweep file names a recipe, and lists under `[grid]` the values of each key; every combination is a cell, and
every cell is trained once for each seed. `[set]` holds values that all cells share, `[measure]` changes the
recipe's.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.training.recipe import (
    MAX_BYTES,
    Measure,
    PositiveInt,
    Recipe,
    Table,
    check_module_options,
    check_plain,
    explain_validation_error,
    read_recipe,
    recipe_text,
    shipped_recipes,
)

MAX_RUNS = 10_000
MAX_NAME = 100  # characters of a cell's folder
WITHOUT = "none"  # as the value of modules.NAME or losses.NAME: leave it out
_SAFE = re.compile(r"[A-Za-z0-9_.=+-]+")  # no comma: it separates folders in compare-models


@dataclass(frozen=True)
class Cell:
    """One combination of values.

    changes: of the recipe, by full key         label: for tables         folder: name of its folder
    """

    changes: Mapping[str, Any]
    label: str
    folder: str


class Sweep(Table):
    """What a sweep file holds. recipe: a TOML file, or the name of a shipped recipe."""

    recipe: str
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    measure: Measure | None = None
    seeds: PositiveInt = 1
    about: str = ""
    command: str = ""
    cost: str = ""
    result: str = "not measured yet"

    def cells(self) -> list[Cell]:
        """Every combination of the grid's values, in the order of the keys; one cell without a grid."""
        for key, values in self.grid.items():
            if not values:
                raise InputError(f"grid: expected at least one value of {key}, got none")
            if key.partition(".")[0] in ("seed", "measure"):
                raise InputError(f"grid: {key} cannot be swept. Give the number of seeds by --seeds.")
        count = self.seeds
        for values in self.grid.values():
            count *= len(values)
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
        given = {key: None if _leaves_out(key, value) else value for key, value in changes.items()}
        recipe = read_recipe(self.recipe, given)
        check_module_options(recipe.modules)
        return recipe.model_copy(update={"seed": recipe.seed + number})


def _leaves_out(key: str, value: Any) -> bool:
    table, _, name = key.partition(".")
    return value == WITHOUT and table in ("modules", "losses") and bool(name) and "." not in name


def _cell(keys: Sequence[str], values: Sequence[Any]) -> Cell:
    lasts = [key.rpartition(".")[2] for key in keys]
    short = keys if len(set(lasts)) < len(lasts) else lasts
    texts = [value_text(value) for value in values]
    label = ", ".join(f"{key}={text}" for key, text in zip(short, texts, strict=True))
    changes = dict(zip(keys, values, strict=True))
    folder = "+".join(f"{key}={text}" for key, text in zip(keys, texts, strict=True))
    if folder and (not _SAFE.fullmatch(folder) or len(folder) > MAX_NAME):
        digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
        folder = f"{re.sub(r'[^A-Za-z0-9_.=+-]+', '-', folder)[:MAX_NAME].strip('-')}-{digest}"
    return Cell(changes, label or "recipe", folder or "recipe")


def value_text(value: Any) -> str:
    """A value of a recipe for people.

    >>> value_text(0.5), value_text([0, 3]), value_text({"branches": 2})
    ('0.5', '[0, 3]', '{branches=2}')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={value_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- what the user gives ---------------------------------------------------------------------------


def read_sweep(
    source: str | Path,
    values: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | None = None,
) -> Sweep:
    """A sweep file, a shipped sweep, or a recipe, with further values.

    values: by full key; several of a key are swept, one is set. They replace those of the file
    """
    content = _content(str(source))
    check_plain(content)
    check_plain(dict(values or {}))
    grid, fixed = dict(content.get("grid", {})), dict(content.get("set", {}))
    for key, given in (values or {}).items():
        grid.pop(key, None)
        fixed.pop(key, None)
        if len(given) == 1:
            fixed[key] = given[0]
        else:
            grid[key] = list(given)
    content |= {"grid": grid, "set": fixed}
    if seeds is not None:
        content["seeds"] = seeds
    try:
        return Sweep(**content)
    except ValidationError as error:
        raise explain_validation_error(error, Sweep) from None


def _content(source: str) -> dict[str, Any]:
    """The tables of a sweep file; of a recipe, a sweep without a grid."""
    text = shipped_sweeps().get(source) if not Path(source).is_file() else None
    if text is None:
        if not Path(source).exists() and source not in shipped_recipes():
            known = [*shipped_sweeps(), *shipped_recipes()]
            hint = "Expected a TOML file, or the name of a shipped sweep or recipe."
            raise UnknownNameError("sweep or recipe", source, known, hint)
        text = recipe_text(source)
    if len(text) > MAX_BYTES:
        raise InputError(f"{source} is not a sweep: expected at most {MAX_BYTES:,} bytes, got {len(text):,}")
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not a readable TOML file ({error})") from error
    if "grid" in content or "recipe" in content:
        return content
    return {"recipe": source, "seeds": 1}


def shipped_sweeps() -> dict[str, str]:
    """Name -> text of each sweep in the package."""
    folder = files("steadygaze") / "training" / "sweeps"
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name
    )
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in entries}


def parse_grid(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Values by key from key=value,value: TOML, a word without quotes is a string. Commas inside brackets,
    braces and quotes do not separate values.

    >>> parse_grid(["losses.adl.tau=1,2.5", "data.images=[0, 3],[0, 6]", "optimizer.betas=[0.9, 0.95]"])
    {'losses.adl.tau': [1, 2.5], 'data.images': [[0, 3], [0, 6]], 'optimizer.betas': [[0.9, 0.95]]}
    >>> parse_grid(["modules.tap=none,{branches = 2}", "about='a, b'"])
    {'modules.tap': ['none', {'branches': 2}], 'about': ['a, b']}
    """
    values: dict[str, list[Any]] = {}
    for text in settings:
        key, separator, given = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"--set: expected KEY=VALUE or KEY=VALUE,VALUE,..., got {text!r}")
        pieces = _split(given)
        if len(pieces) > 1 and not all(pieces):
            raise InputError(f"--set: expected a value on each side of a comma, got {text!r}")
        values[key.strip()] = [parse_value(piece) for piece in pieces]
    return values


def parse_value(text: str) -> Any:
    """A value in TOML; anything else is a string.

    >>> parse_value("0.5"), parse_value("cifar10/train")
    (0.5, 'cifar10/train')
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


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
