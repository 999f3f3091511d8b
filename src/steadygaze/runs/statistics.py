"""Confidence by bootstrap over images: percentile intervals, seeded; differences between two methods are paired.

Images are drawn with replacement, the same draws for every method and measure of a data set. A draw is kept as how
often each image was taken, so that one matrix product gives the resampled means of all methods at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float

from steadygaze.faithfulness.metric import mean as plain_mean
from steadygaze.faithfulness.metric import pooled

LEVEL = 0.95
CELLS = 8_000_000  # entries of the draws that are held at once

Combine = Callable[..., float]


def draws(images: int, repeats: int, seed: int) -> Iterator[Float[np.ndarray, "r n"]]:
    """How often each image was taken, for each repeat; in pieces that fit into memory.

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
    """The data set's number of each of k methods over n images, and the same of every resampled data set.

    values: NaN where there is none; such an image counts for nothing. details: (k, n, d), what `combine` needs besides.
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
    """The limits between which the middle 95 % of the resampled numbers lie; NaN if none is defined.

    A draw may hold no picture for which the number is defined: it counts for nothing.
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
