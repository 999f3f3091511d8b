"""Which runs can stand in one table: those whose numbers were measured alike, on the same pictures.

Runs may differ in methods, scores, metrics and how many pictures of one data set were taken. Numbers for another class,
at other ratios, with another fill, seed or preprocessing, or of other pictures in a folder of the same name are another table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from steadygaze.runs.store import Key, key_of

if TYPE_CHECKING:
    from steadygaze.runs.rows import Rows

ALIKE = ("target", "ratios", "fill", "seed", "preprocessing")
CLOSE = 1e-2  # rounding differs between machines and batches; pictures differ by more
Values = dict[Key, float | None]


def grouped(rows: Rows) -> list[list[int]]:
    """The runs of each table, by number."""
    values = cache(lambda number: _values(rows, number))
    groups: list[list[int]] = []
    for number in range(len(rows.runs)):
        home = next(
            (group for group in groups if all(_alike(rows, number, other, values) for other in group)), None
        )
        if home is None:
            groups.append([number])
        else:
            home.append(number)
    return groups


def _alike(rows: Rows, one: int, two: int, values: Callable[[int], Values]) -> bool:
    a, b = (rows.runs[number]["settings"] for number in (one, two))
    if any(a.get(key) != b.get(key) for key in ("model", "weights", "data", *ALIKE)):
        return False
    if a.get("pictures_hash") == b.get("pictures_hash"):
        return True
    return (
        "pictures" in a and "pictures" in b and _same_pictures(values(one), values(two))
    )  # in memory, names are mere numbers


def _same_pictures(one: Values, two: Values) -> bool:
    """Of two samples of one data set, one is part of the other, and of rows that both have, most are equal."""
    names, others = ({key[0] for key in values} for values in (one, two))
    shared = [
        key for key in one if key in two and key[3] != "agreement"
    ]  # which depends on the other methods of its run
    equal = sum(one[key] == two[key] or abs((one[key] or 0) - (two[key] or 0)) < CLOSE for key in shared)
    return (names <= others or others <= names) and equal >= len(shared) / 2


def _values(rows: Rows, number: int) -> Values:
    return {
        key_of(row): row["value"]
        for which, row in rows.everything()
        if which == number and "unreadable" not in row
    }


def told_apart(rows: Rows, group: Sequence[int], others: Sequence[Sequence[int]]) -> str:
    """What tells a group of runs from others of a model and data set of the same names; "" if there is none."""
    own = rows.runs[group[0]]["settings"]
    rest = [rows.runs[other[0]]["settings"] for other in others if other is not group]
    rest = [
        settings for settings in rest if all(settings.get(key) == own.get(key) for key in ("model", "data"))
    ]
    changed = [
        key for key in ("weights", *ALIKE) if any(settings.get(key) != own.get(key) for settings in rest)
    ]
    words = [f"{key} {_plain(own.get(key))}" for key in changed]
    if rest and not words:
        words = [f"pictures of {rows.folders[group[0]].name}"]
    return ", ".join(words)


def _plain(value: Any) -> str:
    if value is None:
        return "as usual"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(f"{x:g}" for x in value) if isinstance(value, list) else str(value)
