"""What a stress run measures, as typed values: settings, conditions, quantities and numbers.

Figures and tables are data, too: a suite declares them, `report` draws them, the command line prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from steadygaze.quantity import Better, Quantity, mean, pooled
from steadygaze.robustness.by_class import wilson
from steadygaze.runs.statistics import interval

FADED = 8  # groups from here on are thin and gray, without a name in the legend


@dataclass(frozen=True)
class Bar:
    """A value with its 95 % interval, as it is shown (in percent, where it is a share); bars of a group share
    a color."""

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
    """One line, or one point, of a chart. limits, x_limits: (low, high) at each point, drawn as whiskers."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    group: int = 0
    limits: Sequence[tuple[float, float]] | None = None
    x_limits: Sequence[tuple[float, float]] | None = None


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


Level = float | str | tuple[float, ...] | None


@dataclass(frozen=True)
class Setting:
    """One setting of a stress run.

    Attributes:
        suite: The suite that defines it.
        name: What is done, such as "fog".
        level: How much of it, such as the severity 3; None where there is nothing to choose.
        source: The name of the image set, for suites with images of their own; empty for the data of the run.
        label: The value of "setting" in rows; default: name, or name/level.
        minor: One of a series that a score summarizes, such as one severity; short tables leave it out.

    Examples:
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
            object.__setattr__(self, "label", self._default_label)

    @property
    def _default_label(self) -> str:
        return self.name if self.level is None else f"{self.name}/{level_text(self.level)}"

    @property
    def population(self) -> str:
        """Which images it is measured on: empty for the data of the run, otherwise this setting's own
        images."""
        return self.label if self.source else ""

    @property
    def words(self) -> str:
        """The label for people, with its level: "gaussian noise 3"."""
        words = self.label.replace("_", " ")
        return words.replace("/", " ") if self.label == self._default_label else words

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

    Examples:
        >>> level_text(0.05), level_text((0.1, 0.9)), level_text("removed")
        ('0.05', '0.1,0.9', 'removed')
    """
    if isinstance(level, tuple):
        return ",".join(f"{value:g}" for value in level)
    return level if isinstance(level, str) else f"{level:g}"


CLEAN = Setting("clean", "clean")


@dataclass(frozen=True)
class Accuracy(Quantity):
    """A share of correct predictions: each image is 0 or 1, so that its interval is Wilson's, and McNemar's
    test compares two models."""


def share(name: str, label: str = "", better: Better = "higher", summary: str = "") -> Quantity:
    """A share in 0..1, shown in percent."""
    return Quantity(name, "%", better, 0, 1, label=label, scale=100, summary=summary)


def accuracy(name: str, label: str = "") -> Accuracy:
    """A share of correct predictions, shown in percent."""
    return Accuracy(name, "%", "higher", 0, 1, label=label, scale=100)


TOP1 = accuracy("top1", "top-1")
TOP5 = accuracy("top5", "top-5")
CONFIDENCE = share("confidence", better="neither", summary="probability of the predicted class")
ECE = share("ece", "ECE", "lower", "expected calibration error")


def restricted(k: int, classes: int) -> Accuracy:
    """Accuracy among the official classes of a data set."""
    return accuracy(f"top{k}_of_{classes}", f"top-{k} of {classes}")


COMBINES = {"mean": mean, "pooled": pooled}  # functions are not read from a file: these have names
NOT_COMBINED = "mean over images: how the metric combines them is registered only where the run was made"


def quantity_record(quantity: Quantity) -> dict[str, Any]:
    """As written to run.json."""
    return {
        "name": quantity.name,
        "unit": quantity.unit,
        "better": quantity.better,
        "label": quantity.label,
        "scale": quantity.scale,
        "digits": quantity.digits,
        "accuracy": isinstance(quantity, Accuracy),
    }


def metric_record(metric: Quantity) -> dict[str, Any]:
    """The same of a metric of `verify`, with its summary, its range, and how it combines images."""
    return {
        **quantity_record(metric),
        "summary": metric.summary,
        "combine": next((name for name, known in COMBINES.items() if known is metric.combine), "own"),
        "low": metric.low if isfinite(metric.low) else None,
        "high": metric.high if isfinite(metric.high) else None,
    }


def quantity_of_record(record: Mapping[str, Any]) -> Quantity:
    """The quantity that run.json describes; `NOT_COMBINED` in its summary if it has a function of its own."""
    fields = {name: value for name, value in record.items() if name != "accuracy" and value is not None}
    combine = fields.pop("combine", "mean")
    if combine not in COMBINES:
        fields["summary"] = f"{fields.get('summary', '')} ({NOT_COMBINED})".strip()
    fields["combine"] = COMBINES.get(combine, mean)
    return Accuracy(**fields) if record["accuracy"] else Quantity(**fields)


Views = UInt8[np.ndarray, "v h w 3"]


@dataclass(frozen=True)
class Condition:
    """One thing that is done to images, and the rows that come of it: every setting with every metric.

    Attributes:
        suite: The suite that makes the images and measures them.
        views: Number of images made of one.
        unchanged: The model is shown the image as it is, so images in memory need no round trip through 8
            bits.
        single: One image at a time, for views that differ in number.
        argument: Anything else that the suite needs to know.
    """

    suite: str
    settings: tuple[Setting, ...]
    metrics: tuple[Quantity, ...]
    views: int = 1
    unchanged: bool = False
    single: bool = False
    argument: Any = None

    @property
    def setting(self) -> Setting:
        """The first setting; most conditions have just one."""
        return self.settings[0]

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """(setting, metric) of every row of one image."""
        return tuple((setting.label, metric.name) for setting in self.settings for metric in self.metrics)


BROKEN_LOGITS = "broken logits"  # NaN or infinite: the image does not count there


@dataclass(frozen=True)
class Measurement:
    """One metric of one setting for each image of a batch.

    Attributes:
        values: (B,), one number for each image.
        details: (B, D), or B arrays of any length: the numbers behind the values.
        flags: Index in the batch -> what is wrong with it; of broken ones the value is hidden.
    """

    setting: Setting
    metric: Quantity
    values: np.ndarray
    details: np.ndarray | Sequence[np.ndarray] | None = None
    flags: dict[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class SampleImage:
    """An image that a report shows. wide: a sheet of several images, shown below the others with its title as
    text."""

    title: str
    image: Image.Image
    wide: bool = False


@dataclass(frozen=True)
class Score:
    """A number of the whole data set that follows from measurements.

    Attributes:
        samples: Its value on the data set, then on every resampled data set, in the order of `Card.draws`.
        headline: Whether the command line prints it on a line of its own.
        shares: Of a share of images, the 0 or 1 of each: its interval is then Wilson's.
    """

    setting: Setting
    quantity: Quantity
    samples: np.ndarray
    images: int
    note: str = ""
    headline: bool = False
    shares: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Number:
    """A number of the card with its 95 % interval.

    Attributes:
        samples: Its value, then that of every resampled data set.
        proportion: A share of images, whose interval is Wilson's; otherwise it is the bootstrap's.
    """

    setting: Setting
    quantity: Quantity
    value: float
    low: float
    high: float
    images: int
    note: str
    samples: np.ndarray
    headline: bool = False
    proportion: bool = False

    def text(self, *, spread: bool = True) -> str:
        """For people: in the unit of the quantity, with its interval."""
        if np.isnan(self.value):
            return "no number"
        return f"{self.quantity.text(self.value)} {self.spread_text if spread else ''}".rstrip()

    @property
    def has_interval(self) -> bool:
        """False where all images have the same value: the bootstrap then has no width, whatever the truth."""
        return self.proportion or self.low != self.high

    @property
    def spread_text(self) -> str:
        """The interval for people: (low–high) of a proportion, ± half of a bootstrap interval, or empty."""
        text = self.quantity.text
        if self.proportion:
            return f"({text(self.low)}–{text(self.high)})"
        return f"±{text((self.high - self.low) / 2)}" if self.has_interval else ""

    @classmethod
    def of(cls, score: Score) -> Number:
        samples = score.samples
        low, high = interval(samples[1:]) if len(samples) > 1 else (samples[0], samples[0])
        limits = float(samples[0]), float(low), float(high)
        number = cls(
            score.setting, score.quantity, *limits, score.images, score.note, samples, score.headline
        )
        return number if score.shares is None else with_wilson(number, score.shares)


def with_wilson(number: Number, values: np.ndarray) -> Number:
    """The number with Wilson's interval if it is a share of images."""
    known = values[~np.isnan(values)]
    if not isinstance(number.quantity, Accuracy) or not len(known) or not np.isin(known, (0, 1)).all():
        return number
    share = wilson(int(known.sum()), len(known))
    return replace(number, low=share.low, high=share.high, proportion=True)


def bar(number: Number, name: str, group: int = 0) -> Bar:
    """A number as a bar, in percent."""
    return Bar(name, 100 * number.value, 100 * number.low, 100 * number.high, group)
