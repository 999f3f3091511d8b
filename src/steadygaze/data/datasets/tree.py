"""Checks of downloaded data sets: what is missing, and what does not belong there.

A folder that lacks something is an error that lists it; `partial=True` accepts what is there, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from steadygaze.data.images import SUFFIXES
from steadygaze.errors import InputError

SHOWN = 6  # names that an error lists


def require_folder(path: str | Path, dataset: str, expected: str) -> Path:
    """The path if it is a folder; otherwise an error that describes the layout of the data set."""
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{dataset}: expected {expected}; {path} {state}")
    return path


def subfolders(path: Path) -> list[str]:
    """Names of the folders inside, sorted, without hidden ones."""
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def image_files(path: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name; reading a dangling link or FIFO names it."""
    return sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and not p.is_dir())


def abbreviated(names: Iterable[str]) -> str:
    """The first few names, and how many more.

    Examples:
        >>> abbreviated("abcdefgh")
        'a, b, c, d, e, f and 2 more'
    """
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def check_complete(
    dataset: str, root: Path, kind: str, expected: Iterable[str], present: Iterable[str], *, partial: bool
) -> str:
    """A note on what is missing, "" if nothing is; an error unless `partial`. Other names are an error."""
    expected, present = list(expected), set(present)
    unexpected = sorted(present - set(expected))
    if unexpected:
        raise InputError(
            f"{dataset}: {root} holds {kind}s that match no class: {abbreviated(unexpected)}. "
            f"Expected {abbreviated(expected)}"
        )
    missing = [name for name in expected if name not in present]
    if missing and (not partial or not present):
        raise InputError(
            f"{dataset}: {root} lacks {len(missing)} of {len(expected)} {kind}s: {abbreviated(missing)}. "
            "Incomplete download? Fetch the rest, or read what is there with partial=True",
            option="partial",
        )
    return f"{len(expected) - len(missing)} of {len(expected)} {kind}s" if missing else ""


def check_count(dataset: str, root: Path, kind: str, count: int, expected: int, *, partial: bool) -> str:
    """As `check_complete`, for a number of things whose names are not known."""
    if count == expected:
        return ""
    if not partial:
        raise InputError(
            f"{dataset}: expected {expected} {kind} in {root}, found {count}. "
            "Incomplete download? partial=True reads what is there",
            option="partial",
        )
    return f"{count} of {expected} {kind}"
