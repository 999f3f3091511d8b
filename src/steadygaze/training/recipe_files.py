"""The TOML files of recipes and sweeps, shipped ones and those of the user, as text. Imports no torch."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from steadygaze.errors import InputError, UnknownNameError

MAX_BYTES = 1_000_000  # of a recipe file


def parse_toml(text: str, source: str | Path) -> dict[str, Any]:
    """The tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
        raise InputError(f"{source} is not a readable TOML file ({error})") from error


def recipe_text(source: str | Path, *kinds: str) -> str:
    """The text of a TOML file, or of a shipped recipe; kinds: "sweep", "recipe", in order of precedence."""
    kinds = kinds or ("recipe",)
    path, what = Path(source), " or ".join(kinds)
    try:
        if path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise InputError(f"{source} is not a {what}: expected at most {MAX_BYTES:,} bytes, got more")
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # OSError also for a name that is too long
        raise InputError(f"{str(source)[:300]} is not a readable TOML file ({error})") from error
    known: dict[str, str] = {}
    for kind in reversed(kinds):
        known |= shipped_recipes(kind)
    if str(source) not in known:
        hint = f"Expected a TOML file or the name of a shipped {what}."
        raise UnknownNameError(what, str(source), known, hint)
    return known[str(source)]


def shipped_recipes(kind: str = "recipe") -> dict[str, str]:
    """Name -> text of each recipe in the package; kind: or "sweep"."""
    folder = files("steadygaze") / "training" / f"{kind}s"
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name
    )
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in entries}


def parse_value(text: str) -> Any:
    """A value in TOML; anything else is a string.

    Examples:
        >>> parse_value("0.5"), parse_value("cifar10/train")
        (0.5, 'cifar10/train')
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text
