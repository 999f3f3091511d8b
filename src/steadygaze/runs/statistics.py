"""Tables of images x columns, and confidence by bootstrap over images.

`verify` and `stress` both collect values of images under columns (a method, score and metric; a setting and
metric), and summarize them by percentile intervals. Images are drawn with replacement, with a seed, the same
draws for every column of a data set, so that differences between two columns are paired. A draw is kept as
how often each image was taken: one matrix product gives the resampled means of all columns at once.

Sentences that tables, pages and the command line share.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Float

from steadygaze.errors import InputError
from steadygaze.quantity import Combine, pooled
from steadygaze.quantity import mean as plain_mean
from steadygaze.runs.rows import Columns

LEVEL = 0.95
CELLS = 2_000_000  # entries of the draws that are held at once

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

    Args:
        rows: Where the values are.
        positions: Which of them belong to the table.
        by: The names that distinguish columns.
        column: From the values of these names to the key of a column.
        uneven: Whether the details of a column may differ in length from image to image.
        unique: Two rows of an image with different values are an error; otherwise the last one counts.

    Examples:
        >>> from steadygaze.runs.rows import Columns
        >>> lines = [("top1", "b.png", 1), ("top1", "a.png", 0), ("top5", "b.png", 1)]
        >>> rows = Columns.of((0, {"metric": m, "image": i, "value": v}) for m, i, v in lines)
        >>> table = ImageTable(rows, np.arange(3), ["metric"], lambda metric: metric)
        >>> table.names, table.array("top5").tolist()
        (['a.png', 'b.png'], [nan, 1.0])
    """

    def __init__(
        self,
        rows: Columns,
        positions: np.ndarray,
        by: Sequence[str],
        column: Callable[..., Column],
        *,
        uneven: Callable[[Column], bool] = lambda column: False,
        unique: bool = False,
    ) -> None:
        self._rows, self._positions, self._unique = rows, positions, unique
        self._groups = rows.groups(by, positions)
        first = positions[self._groups.first]
        values = zip(*(rows.text(name, first) for name in by), strict=True)
        self._number = {column(*names): number for number, names in enumerate(values)}
        images = rows.codes["image"]
        self._known = np.bincount(images[positions], minlength=len(rows.names["image"])) > 0
        texts = rows.values_of("image")
        self.names: list[str] = sorted(texts[np.flatnonzero(self._known)])
        """All images in order of name: results do not depend on the order in which rows came."""
        self._rank = np.full(len(self._known), -1, dtype=np.int64)
        codes = rows.names["image"]
        self._rank[[codes[name] for name in self.names]] = np.arange(len(self.names))
        for key in self._number:
            if not uneven(key):
                self._check_details(key)

    def _check_details(self, column: Column) -> None:
        rows = self.rows(column)
        lengths = self._rows.lengths[rows]
        lengths, rows = lengths[lengths > 0], rows[lengths > 0]
        other = np.flatnonzero(lengths != lengths[0]) if len(lengths) else lengths
        if len(other):
            raise InputError(
                f"{self._rows.text('image', rows[other[:1]])[0]}: expected {lengths[0]} numbers behind the "
                f"value of {column}, as for others, got {lengths[other[0]]}. The rows are of runs with "
                "different settings."
            )

    def rows(self, column: Column) -> np.ndarray:
        """The rows of a column."""
        return self._positions[self._groups.rows(self._number[column])]

    def __contains__(self, column: Column) -> bool:
        return column in self._number

    def __len__(self) -> int:
        return len(self.names)

    @property
    def columns(self) -> list[Column]:
        """The columns in order of arrival."""
        return list(self._number)

    def ranks(self, rows: np.ndarray) -> np.ndarray:
        """The rank of the image of each row in `names`."""
        return self._rank[self._rows.codes["image"][rows]]

    def count(self, column: Column) -> int:
        """The number of images of a column, undefined values included."""
        return len(np.unique(self.ranks(self.rows(column))))

    def array(self, column: Column) -> np.ndarray:
        """The value of each image in order of name, NaN where there is none."""
        rows = self.rows(column)
        ranks, values = self.ranks(rows), self._rows.value[rows]
        out = np.full(len(self), np.nan)
        out[ranks] = values
        if self._unique:
            conflicts = int((~np.isclose(out[ranks], values, rtol=0, atol=0, equal_nan=True)).sum())
            if conflicts:
                raise InputError(
                    f"{column}: {conflicts} images have two rows with different values. The folder holds "
                    "rows of two runs: remove the row file that does not belong to it."
                )
        return out

    def mean(self, column: Column) -> float:
        """The mean of the values as they came; NaN if there is none."""
        values = self._rows.value[self.rows(column)]
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else float("nan")

    def detail(self, column: Column) -> np.ndarray | None:
        """(images, numbers) behind the values, NaN where there are none; None if the column has no
        details.
        """
        rows = self.rows(column) if column in self else np.empty(0, dtype=np.int64)
        rows = rows[self._rows.lengths[rows] > 0]
        if not len(rows):
            return None
        numbers = self._rows.details(rows).astype(np.float32).reshape(len(rows), -1)
        out = np.full((len(self), numbers.shape[1]), np.nan)
        out[self.ranks(rows)] = numbers
        return out


def draws(images: int, repeats: int, seed: int) -> Iterator[Float[np.ndarray, "r n"]]:
    """How often each image is taken, for each repeat; in pieces that fit into memory.

    Examples:
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

    Args:
        values: NaN where undefined; such an image is left out.
        details: (k, n, d), what `combine` needs besides.
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
    patterns, pattern_of = np.unique(known, axis=0, return_inverse=True)  # most columns have the same images
    patterns = patterns.astype(np.float64)

    def function(taken: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return (taken @ filled.T) / (taken @ patterns.T)[:, pattern_of.ravel()]

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


def resampled_share(
    values: Float[np.ndarray, " n"], known: Bool[np.ndarray, " n"], repeats: int, seed: int
) -> Float[np.ndarray, " r"]:
    """The mean of the known values of the data, then of every resampled data set, NaN where none is known;
    with the same draws as `bootstrap`."""
    hits, of = np.where(known, values, 0.0), known.astype(np.float64)
    samples = [np.array([hits.sum() / of.sum()])]
    for counts in draws(len(values), repeats, seed):
        with np.errstate(invalid="ignore", divide="ignore"):
            samples.append((counts @ hits) / (counts @ of))
    return np.concatenate(samples)


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


def mean_differences(
    values: Float[np.ndarray, "k n"], base: Float[np.ndarray, "n"], *, repeats: int = 2000, seed: int = 0
) -> list[tuple[float, float, float]]:
    """`difference` of the mean of each column to that of one other; columns with the same images share their
    draws.
    """
    known = ~np.isnan(values + base)
    out = [(float("nan"),) * 3] * len(values)
    patterns, pattern_of = np.unique(known, axis=0, return_inverse=True)
    for number, both in enumerate(patterns):
        if not both.any():
            continue
        columns = np.flatnonzero(pattern_of.ravel() == number)
        point, samples = bootstrap(
            np.concatenate([values[columns], base[None]])[:, both], repeats=repeats, seed=seed
        )
        low, high = interval(samples[:, :-1] - samples[:, -1:])
        for k, column in enumerate(columns):
            out[column] = float(point[k] - point[-1]), float(low[k]), float(high[k])
    return out


ENOUGH = 20  # images; a bootstrap interval of 12 images covers the truth in 91 % of cases, one of 4 in 80 %


FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # first characters of what spreadsheets compute
INTERVALS = (
    "95 % intervals: Wilson's for accuracies, bootstrap (±) for other numbers; none where all images have "
    "the same value"
)


def csv_text(value: Any) -> Any:
    """A value as a cell of a CSV file: a text that a spreadsheet would compute gets an apostrophe in front.

    >>> csv_text("=HYPERLINK(1)"), csv_text("cat"), csv_text(-1)
    ("'=HYPERLINK(1)", 'cat', -1)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value


def markdown_text(text: str) -> str:
    """A name as the text of one Markdown cell: no markup, no HTML, no end of a cell or line.

    >>> print(markdown_text("a|b <i> `c`"))
    a\\|b &lt;i&gt; \\`c\\`
    """
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*|\[\]])", r"\\\1", escape(one_line, quote=False))


LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "−": "$-$",
    "–": "--",
    "±": r"$\pm$",
}


def latex_text(text: str) -> str:
    r"""A name as LaTeX text on one line: no commands, no end of a cell.

    >>> print(latex_text("gaze_outline & 5 % ↑"))
    gaze\_outline \& 5 \% $\uparrow$
    """
    return "".join(LATEX.get(sign, sign) for sign in " ".join(text.split()))


def told_apart(runs: Sequence[dict[str, Any]], folders: Sequence[Path | None]) -> list[str]:
    """The names of the models of runs; different weights of one name with the checkpoint, the folder of the
    model or that of the run, the first of these that tells them apart, by the shortest end of its path that
    does; else with their hash.

    >>> run = {"settings": {"model": "vit", "checkpoint": "a.pt", "weights": "01"}}
    >>> other = {"settings": {"model": "vit", "checkpoint": "b.pt", "weights": "02"}}
    >>> told_apart([run, other], [None, None]), told_apart([run, run], [None, None])
    (['vit (a.pt)', 'vit (b.pt)'], ['vit', 'vit'])
    >>> places = {"x/w.pt": run, "y/w.pt": other}
    >>> given = [{**one, "about": {"given": {"checkpoint": path}}} for path, one in places.items()]
    >>> told_apart(given, [None, None])
    ['vit (x/w.pt)', 'vit (y/w.pt)']
    """
    facts = [run["settings"] for run in runs]
    names = [str(one["model"]) for one in facts]
    weights = [str(one["weights"]) for one in facts]
    if len(set(zip(names, weights, strict=True))) == len(set(names)):
        return names
    given = [run.get("about", {}).get("given", {}) for run in runs]
    paths = [
        [
            str(known.get("checkpoint") or one.get("checkpoint") or "")
            for known, one in zip(given, facts, strict=True)
        ],
        [str(one.get("model") or "") for one in given],
        [str(folder or "") for folder in folders],
    ]
    for mark in (ends for kind in paths for ends in _ends(kind)):
        marked = set(zip(names, mark, strict=True))
        if len(marked) == len(set(zip(names, mark, weights, strict=True))):
            return [f"{name} ({own})" if own else name for name, own in zip(names, mark, strict=True)]
    return [f"{name} ({own})" for name, own in zip(names, weights, strict=True)]


def _ends(paths: Sequence[str]) -> Iterator[list[str]]:
    """The last parts of each path: one, two, and so on."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        yield ["/".join(own[-count:]) for own in parts]


def small_sample_note(images: int) -> str:
    """A caution about intervals from few images; "" if there are enough."""
    if images >= ENOUGH:
        return ""
    if images == 1:
        return "One image gives no interval: nothing can be concluded about other images."
    return (
        f"{images} images are few: the 95 % intervals in the table are too narrow. Use {ENOUGH} or more "
        "before relying on a difference."
    )
