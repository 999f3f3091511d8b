"""What long calls report while they run: `explain`, `verify`, `stress` and `train` all take `on_progress`.

sg.verify(model, data, on_progress=lambda p: print(f"{p.task}: {p.done}/{p.total} {p.unit}"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a call has come.

    A loop reports once before its first unit (done=0, or what an earlier run finished) and after each unit.
    What runs inside it, such as a search, reports to the same callback under a task of its own.

    Attributes:
        task: What is running, such as "verify" or the name of a search method.
        done: Units finished so far, including those of an earlier, resumed run.
        total: Units in all, None if unknown.
        unit: What is counted, such as "images".
        resumed: How many of `done` were finished by an earlier run.
        detail: What else is worth showing, such as the current loss.
    """

    task: str
    done: int
    total: int | None
    unit: str
    resumed: int = 0
    detail: str = ""

    @property
    def fraction(self) -> float | None:
        """The finished share, 0..1; None if the total is unknown."""
        return None if not self.total else min(1.0, self.done / self.total)


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Ignore the progress: the default, which shows nothing."""
