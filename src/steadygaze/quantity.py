"""What a number is: its unit, its range, which direction is better, and how it is written for people.

Everything that a run measures is a `Quantity`: the metrics of `verify`, and the metrics and derived scores of
`stress`. Each is one entry of one table; reports, tables and the command line read it and know no metric by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from math import isfinite
from typing import Any, Literal

Better = Literal["higher", "lower", "neither"]
Combine = Callable[[Any, Sequence[Any]], float]  # values and details of many images -> the data set's number
INF = float("inf")


def mean(values: Any, details: Sequence[Any] = ()) -> float:
    """The mean of the defined values; NaN if there is none."""
    import numpy as np  # here, since the command line starts without it

    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def pooled(values: Any, details: Sequence[Any]) -> float:
    """100 · mean over pairs of Σ first / Σ second, summed over the images; details are [a₁, b₁, a₂, b₂, ...].

    A pair whose second number is zero everywhere (no such pixel in the data) is left out.
    """
    import numpy as np

    defined = [d for d in details if d is not None]
    if not defined:
        return float("nan")
    total = np.asarray(defined, dtype=np.float64).sum(0).reshape(-1, 2)
    total = total[total[:, 1] > 0]
    return float(100 * (total[:, 0] / total[:, 1]).mean()) if len(total) else float("nan")


def iou_from_counts(correct: Any, predicted: Any, true: Any) -> Any:
    """correct / (predicted + true − correct), NaN for a class that does not occur; of tensors or arrays."""
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        return correct / (predicted + true - correct)


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """A number of things.

    Examples:
        >>> plural(1, "image"), plural(2, "image"), plural(2, "class", "classes")
        ('1 image', '2 images', '2 classes')
    """
    return f"{count} {noun if count == 1 else plural_noun or noun + 's'}"


def percent(probability: float | None) -> str:
    """A probability as text: "62 %", "99.7 %", "0.3 %".

    Examples:
        >>> percent(0.934)
        '93 %'
    """
    if probability is None:
        return ""
    share = 100 * probability
    return f"{share:.0f} %" if 1 <= share < 99 else f"{share:.1f} %"


@dataclass(frozen=True)
class Quantity:
    """One measured or derived number.

    Attributes:
        unit: "%", "points" (differences of percentages), "nats", ...; empty for a number without one.
        better: Which direction is better; "neither" for descriptive numbers.
        low: Lower end of the range of its values.
        high: Upper end of the range of its values.
        label: Its name in words, for pages, where it differs from the name without underscores; tables of
            the terminal and files use `name`.
        summary: What it is, in one sentence.
        scale: Factor between the value in a row and the value that is shown, such as 100 for shares that are
            read in percent.
        digits: Decimals that are shown; None: one in percent and points, three otherwise.
        combine: The data set's number from the values and details of its images.

    Examples:
        >>> accuracy = Quantity("top1", "%", "higher", 0, 1, label="top-1", scale=100)
        >>> accuracy.title + accuracy.arrow, accuracy.text(0.7321)
        ('top1 ↑', '73.2')
    """

    name: str
    unit: str = ""
    better: Better = "higher"
    low: float = -INF
    high: float = INF
    _: KW_ONLY
    label: str = ""
    summary: str = ""
    scale: float = 1.0
    digits: int | None = None
    combine: Combine = mean

    @property
    def title(self) -> str:
        """The heading of its column or row in the terminal and in files: the name."""
        return self.name

    @property
    def words(self) -> str:
        """The heading on a page.

        >>> Quantity("deletion_aopc", label="deletion AOPC").words, Quantity("mean_error").words
        ('deletion AOPC', 'mean error')
        """
        return self.label or self.name.replace("_", " ")

    @property
    def arrow(self) -> str:
        """The better direction, to be written after the title."""
        return {"higher": " ↑", "lower": " ↓"}.get(self.better, "")

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is, 0 if neither."""
        return {"higher": 1, "lower": -1}.get(self.better, 0)

    @property
    def direction_text(self) -> str:
        """The better direction in words; empty for descriptive numbers."""
        return "" if self.better == "neither" else f"{self.better} is better"

    @property
    def range_text(self) -> str:
        """Range, unit and direction, such as "0 to 100 %, higher is better"."""
        limits = [
            f"at least {self.low:g}" if isfinite(self.low) else "",
            f"at most {self.high:g}" if isfinite(self.high) else "",
        ]
        span = f"{self.low:g} to {self.high:g}" if all(limits) else "".join(limits)
        span = f"{span} {self.unit}".strip()
        return ", ".join(filter(None, (span, self.direction_text or "neither direction is better")))

    def text(self, value: float) -> str:
        """A value of this quantity as it is shown, without its unit."""
        digits = self.digits if self.digits is not None else (1 if self.unit in ("%", "points") else 3)
        return f"{self.scale * value:.{digits}f}"


@dataclass(frozen=True)
class Curve:
    """How the report draws the details of a metric, which are a curve over the ratios."""

    title: str
    axis: str
    better: str
