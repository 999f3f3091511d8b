"""One registry for every kind of thing that users can add: methods, adapters, metrics, suites and losses.

A registry maps a name to an entry. Entries of this package register themselves when their module is imported;
entries of other packages either call the registration function (`steadygaze.register_method` and the like)
before use, or are discovered through the entry point group `steadygaze.plugins`:

    [project.entry-points."steadygaze.plugins"]
    my_methods = "my_package.steadygaze_methods"  # a module that registers on import, or a function

Plugins are loaded when a registry is first read, so `import steadygaze` stays quick.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from threading import RLock
from types import MappingProxyType
from typing import Generic, TypeVar

from steadygaze.errors import BadInput, UnknownName

GROUP = "steadygaze.plugins"
Entry = TypeVar("Entry")
_PLUGINS_LOADED = False
_LOCK = RLock()


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in order of registration.

    kind: what an entry is called in messages, such as "metric"
    hint: what an error about an unknown name adds, such as where known names are listed
    synonyms: names from papers and other packages, each with the name it has here; offered for unknown names
    """

    def __init__(
        self, kind: str, *, hint: str = "", synonyms: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.kind, self.hint, self.synonyms = kind, hint, synonyms
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry, *, replace: bool = False) -> Entry:
        """Register `entry` under `name`. A name that is taken is an error unless `replace` is true."""
        if not name or any(c in name for c in "+:=, \t\n"):
            raise BadInput(f"{self.kind} {name!r}: expected a name without spaces and without any of + : = ,")
        if name in self._entries and not replace:
            raise BadInput(
                f"a {self.kind} named {name!r} is registered already. "
                "Choose another name or pass replace=True."
            )
        self._entries[name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Forget the entry `name`; for tests and notebooks that define an entry again."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            load_plugins()
        if name not in self._entries:
            raise UnknownName(self.kind, name, self._entries, self.hint, self.synonyms)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._entries)

    def __len__(self) -> int:
        load_plugins()
        return len(self._entries)


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches what a user searches for: part of the name, where a hyphen stands for an
    underscore; or with *, ? and [] a pattern for the whole name.

    >>> matches("deit_tiny_patch16_224", "deit-tiny"), matches("deit_tiny_patch16_224", "vit*")
    (True, False)
    """
    has_wildcards = any(sign in pattern for sign in "*?[")
    wanted = pattern.lower() if has_wildcards else f"*{pattern.lower().replace('-', '_')}*"
    return fnmatch(name.lower(), wanted)


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
