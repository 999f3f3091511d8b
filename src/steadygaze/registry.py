"""One registry for every kind of thing that users can add: methods, adapters, metrics, suites and losses.

A registry maps a name to an entry. Entries of this package register themselves when their module is imported;
entries of other packages either call the registration function (`steadygaze.register_method` and the like)
before use (on the command line in a file, `--plugin FILE`), or are discovered through the entry point group
`steadygaze.plugins`:

    [project.entry-points."steadygaze.plugins"]
    my_methods = "my_package.steadygaze_methods"  # a module that registers on import, or a function

Plugins are loaded when a registry is first read, so `import steadygaze` stays quick.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from steadygaze.errors import InputError, SteadygazeError, UnknownNameError

GROUP = "steadygaze.plugins"
Entry = TypeVar("Entry")
PLUGIN_FILES: list[Path] = []  # of `--plugin`, in this process
REGISTRIES: dict[str, Registry[Any]] = {}  # by kind, of the modules that were imported so far
_PLUGINS_LOADED = False
_LOCK = RLock()


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in order of registration.

    Args:
        kind: What an entry is called in messages, such as "metric".
        built_in: Modules of this package that register entries when they are imported. They are imported, in
            this order, when the registry is first read.
        hint: What an error about an unknown name adds, such as where known names are listed.
        synonyms: Names from papers and other packages, each with the name it has here; they are suggested for
            unknown names.
    """

    def __init__(
        self,
        kind: str,
        *,
        built_in: Sequence[str] = (),
        hint: str = "",
        synonyms: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.kind, self.built_in, self.hint, self.synonyms = kind, built_in, hint, synonyms
        self._entries: dict[str, Entry] = {}
        self._origins: dict[str, str] = {}
        self._loaded = False
        REGISTRIES[kind] = self

    def load(self) -> None:
        """Import the modules of the built-in entries, and the plugins, once."""
        if not self._loaded:
            self._loaded = True  # first: these modules may read the registry themselves
            for module in self.built_in:
                import_module(module)
            # a module may have been imported earlier, by itself: listings and runs keep the declared order
            place = {module: number for number, module in enumerate(self.built_in)}
            self._entries = dict(
                sorted(self._entries.items(), key=lambda item: place.get(self._origins[item[0]], len(place)))
            )
        load_plugins()

    def add(self, name: str, entry: Entry, *, origin: str, replace: bool = False) -> Entry:
        """Register `entry` under `name`. A name that is taken is an error unless `replace` is true.

        Args:
            name: A name without spaces and without any of `+ : = ,`.
            entry: What is registered.
            origin: The module that defines the entry.
            replace: Replace the entry that has this name, instead of raising `InputError`.
        """
        if not name or any(c in name for c in "+:=, \t\n"):
            raise InputError(
                f"{self.kind} {name!r}: expected a name without spaces and without any of + : = ,"
            )
        if name not in self._entries and not is_built_in(origin):
            self.load()  # a name of a built-in entry is taken, whether or not it was used before
        if name in self._entries and not replace:
            raise InputError(
                f"a {self.kind} named {name!r} is registered already. "
                "Choose another name or pass replace=True."
            )
        self._entries[name], self._origins[name] = entry, origin
        return entry

    def is_built_in(self, name: str) -> bool:
        """Whether this package defines the entry."""
        return is_built_in(self._origins[name])

    def remove(self, name: str) -> None:
        """Forget the entry `name`; for tests and notebooks that define an entry again."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            self.load()
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries, self.hint, self.synonyms)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self.load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(self._entries)

    def __len__(self) -> int:
        self.load()
        return len(self._entries)


def catalog() -> dict[str, list[dict[str, Any]]]:
    """Read the descriptions of built-in entries that tools/catalog.py wrote, for listings and reports."""
    import json
    from importlib.resources import files

    text = (files("steadygaze") / "assets" / "catalog.json").read_text(encoding="utf-8")
    entries: dict[str, list[dict[str, Any]]] = json.loads(text)
    return entries


def is_built_in(origin: str | None) -> bool:
    """Whether a module is part of this package; code that is run by `exec` has no module.

    Examples:
        >>> is_built_in("steadygaze.methods.cam"), is_built_in("my_lab.methods")
        (True, False)
    """
    return origin is not None and origin.startswith("steadygaze.")


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches what a user searches for.

    The search is a part of the name, where a hyphen stands for an underscore; or with *, ? and [] a pattern
    for the whole name.

    Examples:
        >>> matches("deit_tiny_patch16_224", "deit-tiny"), matches("deit_tiny_patch16_224", "vit*")
        (True, False)
    """
    has_wildcards = any(sign in pattern for sign in "*?[")
    wanted = pattern.lower() if has_wildcards else f"*{pattern.lower().replace('-', '_')}*"
    return fnmatch(name.lower(), wanted)


def load_plugin_file(path: Path) -> None:
    """Run a Python file of the user that registers something: `--plugin FILE` of every command.

    Raises:
        InputError: If there is no such file, or it fails.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"plugin: expected a Python file that registers a method or the like, got {path}")
    module = module_from_spec(spec)
    PLUGIN_FILES.append(path)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look a class up by its module
    try:
        spec.loader.exec_module(module)
    except SteadygazeError:
        raise
    except Exception as error:  # code of the user may fail in any way
        raise InputError(
            f"plugin {path}: {type(error).__name__}: {error} (--debug shows the traceback)"
        ) from error


def load_plugins() -> None:
    """Load the entry points `steadygaze.plugins`, once. A plugin that fails is skipped with a warning."""
    from importlib.metadata import entry_points  # slow to import, and `--help` reads no registry

    global _PLUGINS_LOADED
    with _LOCK:
        if _PLUGINS_LOADED:
            return
        _PLUGINS_LOADED = True
        for point in entry_points(group=GROUP):
            try:
                loaded = point.load()
                if callable(loaded):
                    loaded()
            except Exception as error:  # code of other packages may fail in any way
                warnings.warn(
                    f"the plugin {point.name!r} ({point.value}) could not be loaded and is skipped: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )
