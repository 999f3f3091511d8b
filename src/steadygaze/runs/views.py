"""How rows show themselves: as a ranking, as cards, as text and as a file.

These views are made by modules that import `runs.rows`. `steadygaze.runs` enters them here, and `Rows` finds
them here, so that rows import none of them.
"""

from collections.abc import Callable
from typing import Any

VIEWS: dict[str, Callable[..., Any]] = {}
