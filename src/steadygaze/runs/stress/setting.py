"""Under what an image is measured: a typed value instead of a string that has to be taken apart again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Level = float | str | tuple[float, ...] | None


@dataclass(frozen=True)
class Setting:
    """One setting of a stress run.

    suite: the suite that defines it
    name: what is done, such as "fog"
    level: how much of it, such as the severity 3; None where there is nothing to choose
    source: the name of the image set, for suites with images of their own; empty for the data of the run
    label: the value of "setting" in rows; default: name, or name/level
    minor: one of a series that a score summarises, such as one severity; short tables leave it out

    >>> Setting("corruptions", "fog", 3).label
    'fog/3'
    """

    suite: str
    name: str
    level: Level = None
    source: str = ""
    label: str = ""
    minor: bool = False

    def __post_init__(self) -> None:
        if not self.label:
            text = self.name if self.level is None else f"{self.name}/{level_text(self.level)}"
            object.__setattr__(self, "label", text)

    @property
    def population(self) -> str:
        """Which images it is measured on: empty for the data of the run, otherwise this setting's own
        images."""
        return self.label if self.source else ""

    @property
    def words(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    def record(self) -> dict[str, Any]:
        """As written to run.json."""
        return {
            "suite": self.suite,
            "name": self.name,
            "level": list(self.level) if isinstance(self.level, tuple) else self.level,
            "source": self.source,
            "label": self.label,
            "minor": self.minor,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Setting:
        level = record["level"]
        fields = {**record, "level": tuple(level) if isinstance(level, list) else level}
        return cls(**fields)


def level_text(level: Level) -> str:
    """A level as labels write it.

    >>> level_text(0.05), level_text((0.1, 0.9)), level_text("removed")
    ('0.05', '0.1,0.9', 'removed')
    """
    if isinstance(level, tuple):
        return ",".join(f"{value:g}" for value in level)
    return level if isinstance(level, str) else f"{level:g}"


CLEAN = Setting("clean", "clean")
