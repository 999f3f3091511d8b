"""Which runs can share a table: those measured with the same settings, on the same images.

Runs may differ in methods, scores, metrics and in how many images of one data set were used. Numbers for
another class, at other ratios, with another fill, seed or preprocessing, or of other images in a folder of
the same name are another table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from steadygaze.runs.rows import Rows

SAME = ("target", "ratios", "fill", "seed", "preprocessing")  # settings that runs of one table share
Contents = dict[str, str]  # image -> content hash; "" in rows of the first version


def group_runs(rows: Rows) -> list[list[int]]:
    """The runs of each table, by number."""
    contents = cache(lambda number: _contents(rows, number))
    groups: list[list[int]] = []
    for number in range(len(rows.runs)):
        fitting = (group for group in groups if all(_comparable(rows, number, n, contents) for n in group))
        group = next(fitting, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


def _comparable(rows: Rows, one: int, two: int, contents: Callable[[int], Contents]) -> bool:
    a, b = (rows.runs[number]["settings"] for number in (one, two))
    if any(a.get(key) != b.get(key) for key in ("model", "weights", "data", *SAME)):
        return False
    if a.get("maps") and b.get("maps") and a["maps"] != b["maps"]:
        return False  # given maps: other ones may have the same name
    from_folders = "pictures" in a and "pictures" in b  # names of images in memory are mere numbers
    if not from_folders:
        return a.get("pictures_hash") == b.get("pictures_hash")
    return _same_images(contents(one), contents(two), a.get("pictures_hash") == b.get("pictures_hash"))


def _same_images(one: Contents, two: Contents, same_list: bool) -> bool:
    """Whether two samples of a data set fit: one contains the other's images, and shared images have one
    content.
    """
    nested = same_list or one.keys() <= two.keys() or two.keys() <= one.keys()
    return nested and all(
        not one[name] or not two[name] or one[name] == two[name] for name in one.keys() & two.keys()
    )


def _contents(rows: Rows, number: int) -> Contents:
    columns = rows.columns()
    own = np.flatnonzero(columns.run == number)[::-1]
    last = own[columns.groups(["image"], own).first]
    contents = (content or "" for content in columns.text("content", last))
    return dict(zip(columns.text("image", last), contents, strict=True))


def distinction(rows: Rows, group: Sequence[int], groups: Sequence[Sequence[int]]) -> str:
    """What distinguishes a group of runs from others with the same model and data; "" if there is no such
    group.
    """
    own = rows.runs[group[0]]["settings"]
    others = [rows.runs[other[0]]["settings"] for other in groups if other is not group]
    others = [s for s in others if all(s.get(key) == own.get(key) for key in ("model", "data"))]
    changed = [key for key in ("weights", *SAME) if any(s.get(key) != own.get(key) for s in others)]
    if own.get("maps") and any(s.get("maps", own["maps"]) != own["maps"] for s in others):
        changed.append("maps")
    if others and not changed:
        return f"images of {rows.folders[group[0]].name}"
    return ", ".join(f"{key} {_value_text(own.get(key))}" for key in changed)


def _value_text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(f"{x:g}" for x in value) if isinstance(value, list) else str(value)
