"""An index of what can be named, so that listing it does not import torch and timm each time.

A JSON file for each list, in the cache folder of the user (`STEADYGAZE_CACHE`, or the platform's). It is
valid for one state of the installed packages; a file that is missing, damaged, of another state or cannot be
written is ignored, and the list is made anew. With plugins installed, nothing is read or written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from steadygaze import __version__
from steadygaze.files import write_atomic
from steadygaze.registry import GROUP

FOLDER = "STEADYGAZE_CACHE"  # environment variable; empty: no cache
SOURCE = Path(__file__).parents[2]  # the package
Entries = list[dict[str, Any]]


def listed(name: str, make: Callable[[], Sequence[Any]], packages: Sequence[str] = ()) -> Entries:
    """The entries of a list as they are printed with --json.

    name: of the list, such as "methods"
    make: gives the entries, as dataclasses; called unless the index has them
    packages: that the list depends on, besides steadygaze
    """
    folder = cache_folder()
    file = None if folder is None else folder / f"{name}.json"
    state = "" if file is None else _state(packages)
    if file is not None and state:
        with suppress(OSError, ValueError, TypeError, KeyError):  # missing or damaged
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["state"] == state and _is_valid(content["entries"]):
                return list(content["entries"])
    entries: Entries = json.loads(json.dumps([asdict(entry) for entry in make()], default=str))
    if file is not None and state:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(file, json.dumps({"state": state, "entries": entries}))
    return entries


def cache_folder() -> Path | None:
    """The folder of the index; None if there is none."""
    given = os.environ.get(FOLDER)
    if given is not None:
        return Path(given) if given else None
    with suppress(RuntimeError):  # no home folder
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "steadygaze"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "steadygaze"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadygaze"
    return None


def _state(packages: Sequence[str]) -> str:
    """What the entries depend on; "" if that is unknown, as with plugins, whose code may change."""
    if entry_points(group=GROUP):
        return ""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return ""
    stats = [file.stat() for file in sorted(SOURCE.rglob("*.py"))]  # an editable installation changes
    stamp = f"{len(stats)} files, {sum(s.st_size for s in stats)} bytes, {max(s.st_mtime_ns for s in stats)}"
    python = ".".join(map(str, sys.version_info[:2]))
    return "; ".join([f"steadygaze {__version__} in {SOURCE}", stamp, f"python {python}", *versions])


def _is_valid(entries: Any) -> bool:
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    )
