"""Tables of images x columns, and confidence by bootstrap over images.

`verify` and `stress` both collect values of images under columns (a method, score and metric; a setting and
metric), and summarise them by percentile intervals. Images are drawn with replacement, with a seed, the same
draws for every column of a data set, so that differences between two columns are paired. A draw is kept as
how often each image was taken: one matrix product gives the resampled means of all columns at once.
"""

from __future__ import annotations

import warnings
from array import array as packed
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Float

from steadygaze.errors import BadInput
from steadygaze.quantity import Combine, pooled
from steadygaze.quantity import mean as plain_mean

LEVEL = 0.95
CELLS = 8_000_000  # entries of the draws that are held at once

Column = TypeVar("Column", bound=Hashable)


@dataclass(frozen=True)
class Cell:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float
    images: int
    note: str = ""


class ImageTable(Generic[Column]):
    """Values, and the numbers behind them, by image and column. A column is any key, such as (setting,
    metric).

    >>> table = ImageTable[str]()
    >>> table.add("top1", "b.png", 1.0), table.add("top1", "a.png", 0.0), table.add("top5", "b.png", 1.0)
    (None, None, None)
    >>> table.names, table.array("top5").tolist()
    (['a.png', 'b.png'], [nan, 1.0])
    """

    def __init__(self) -> None:
        self._index: dict[str, int] = {}  # image -> position in order of arrival
        self._images: dict[Column, packed[int]] = {}
        self._values: dict[Column, packed[float]] = {}
        self._details: dict[Column, dict[int, np.ndarray]] = {}
        self._names: list[str] | None = None

    def add(
        self, column: Column, image: str, value: float | None, detail: Sequence[float | None] | None = None
    ) -> None:
        """Add one row; None is an undefined value."""
        position = self._index.setdefault(image, len(self._index))
        self._images.setdefault(column, packed("q")).append(position)
        self._values.setdefault(column, packed("d")).append(float("nan") if value is None else value)
        if detail:
            numbers = np.array([np.nan if x is None else x for x in detail], dtype=np.float32)
            details = self._details.setdefault(column, {})
            first = next(iter(details.values()), numbers)
            if len(first) != len(numbers):
                raise BadInput(
                    f"{image}: expected {len(first)} numbers behind the value of {column}, as for others, "
                    f"got {len(numbers)}. The rows are of runs with different settings."
                )
            details[position] = numbers
        self._names = None

    def __contains__(self, column: Column) -> bool:
        return column in self._values

    def __len__(self) -> int:
        return len(self._index)

    @property
    def columns(self) -> list[Column]:
        """The columns in order of arrival."""
        return list(self._values)

    @property
    def names(self) -> list[str]:
        """All images in order of name: results do not depend on the order in which rows came."""
        if self._names is None:
            self._names = sorted(self._index)
        return self._names

    def names_of(self, columns: Iterable[Column]) -> list[str]:
        """The images that have a row in any of these columns, in order of name."""
        positions = {position for column in columns for position in self._images[column]}
        return [name for name in self.names if self._index[name] in positions]

    def count(self, column: Column) -> int:
        """The number of images of a column, undefined values included."""
        return len(set(self._images[column]))

    def array(self, column: Column, names: Sequence[str] | None = None) -> np.ndarray:
        """The values of these images (default: all, in order of name), NaN where there is none."""
        out = np.full(len(self._index), np.nan)
        out[np.frombuffer(self._images[column], dtype=np.int64)] = self._values[column]
        return out[self._positions(names)]

    def detail(self, column: Column, names: Sequence[str] | None = None) -> np.ndarray | None:
        """(images, numbers) behind the values, NaN where there are none; None if the column has no
        details.
        """
        details = self._details.get(column)
        if not details:
            return None
        out = np.full((len(self._index), len(next(iter(details.values())))), np.nan)
        out[list(details)] = np.stack(list(details.values()))
        return out[self._positions(names)]

    def _positions(self, names: Sequence[str] | None) -> np.ndarray:
        return np.array([self._index[name] for name in (self.names if names is None else names)], dtype=int)


def draws(images: int, repeats: int, seed: int) -> Iterator[Float[np.ndarray, "r n"]]:
    """How often each image is taken, for each repeat; in pieces that fit into memory.

    >>> next(draws(5, 2, seed=0)).sum(1).tolist()
    [5.0, 5.0]
    """
    rng = np.random.default_rng(seed)
    step = max(1, CELLS // max(1, images))
    for start in range(0, repeats, step):
        rows = min(step, repeats - start)
        taken = rng.integers(0, images, (rows, images)) + images * np.arange(rows)[:, None]
        yield np.bincount(taken.ravel(), minlength=rows * images).reshape(rows, images).astype(np.float64)


def bootstrap(
    values: Float[np.ndarray, "k n"],
    details: np.ndarray | None = None,
    *,
    combine: Combine = plain_mean,
    repeats: int = 2000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "r k"]]:
    """The data set's number of each of k columns over n images, and the same of every resampled data set.

    values: NaN where undefined; such an image is left out
    details: (k, n, d), what `combine` needs besides
    """
    images = values.shape[1]
    every = np.ones((1, images))
    if combine is plain_mean:
        function = _means(values)
    elif combine is pooled and details is not None:
        function = _pooled(details)
    else:
        function = _any(values, details, combine)
    return function(every)[0], np.concatenate([function(taken) for taken in draws(images, repeats, seed)])


def _means(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)

    def function(taken: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return (taken @ filled.T) / (taken @ known.T.astype(np.float64))

    return function


def _pooled(details: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    filled = np.nan_to_num(details)

    def function(taken: np.ndarray) -> np.ndarray:
        sums = np.einsum("rn,knd->rkd", taken, filled, optimize=True).reshape(len(taken), len(details), -1, 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.where(sums[..., 1] > 0, sums[..., 0] / sums[..., 1], np.nan)
            there = ~np.isnan(shares)
            return 100 * np.where(there, shares, 0).sum(-1) / there.sum(-1)

    return function


def _any(
    values: np.ndarray, details: np.ndarray | None, combine: Combine
) -> Callable[[np.ndarray], np.ndarray]:
    def function(taken: np.ndarray) -> np.ndarray:
        out = np.empty((len(taken), len(values)))
        for r, times in enumerate(taken):
            rows = np.repeat(np.arange(values.shape[1]), times.astype(int))
            for k in range(len(values)):
                out[r, k] = combine(values[k, rows], [] if details is None else list(details[k, rows]))
        return out

    return function


def interval(samples: Float[np.ndarray, "r *k"]) -> tuple[np.ndarray, np.ndarray]:
    """The limits of the middle 95 % of the resampled numbers; NaN if none is defined.

    A draw without any image for which the number is defined is left out.
    """
    tail = 50 * (1 - LEVEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN
        low, high = np.nanpercentile(samples, [tail, 100 - tail], axis=0)
    return low, high


def difference(
    values: Float[np.ndarray, "2 n"],
    details: np.ndarray | None = None,
    *,
    combine: Combine = plain_mean,
    repeats: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """First minus second over the images that both have: value, low, high."""
    both = ~np.isnan(values).any(0)
    if not both.any():
        return float("nan"), float("nan"), float("nan")
    point, samples = bootstrap(
        values[:, both],
        None if details is None else details[:, both],
        combine=combine,
        repeats=repeats,
        seed=seed,
    )
    low, high = interval(samples[:, 0] - samples[:, 1])
    return float(point[0] - point[1]), float(low), float(high)
