"""Figures and tables as data: a suite declares them, `report` draws them and the command line prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FADED = 8  # groups from here on are thin and grey, without a name in the legend


@dataclass(frozen=True)
class Bar:
    """A value with its 95 % interval, as it is shown (in percent, where it is a share); bars of a group share
    a colour."""

    label: str
    value: float
    low: float
    high: float
    group: int = 0


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars. legend: the names of the groups."""

    title: str
    bars: Sequence[Bar]
    x_label: str
    caption: str = ""
    highest: float | None = None
    legend: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """One line of a chart. limits: (low, high) at each point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    group: int = 0
    limits: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True)
class LineChart:
    """Lines over one axis. integers: the x axis counts something."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    caption: str = ""
    integers: bool = False


@dataclass(frozen=True)
class Heatmap:
    """A small grid of percentages, rows from top to bottom; NaN where there is none."""

    title: str
    values: Sequence[Sequence[float]]
    x_label: str
    y_label: str
    caption: str = ""


Figure = BarChart | LineChart | Heatmap


@dataclass(frozen=True)
class Table:
    """A table of text. The first column is aligned to the left, the others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
