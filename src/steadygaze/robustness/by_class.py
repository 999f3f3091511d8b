"""What changed between two models on the same images: by class, by image, and whether it could be chance.

before, after     correct or not for each image, in the same order; gained: wrong → right, lost: right → wrong
Wilson            interval of one accuracy (E. B. Wilson, 1927)
Newcombe          interval of a paired difference, from two Wilson intervals and their correlation (method 10
                  of R. G. Newcombe, Statistics in Medicine 17, 1998): valid with few images per class, where
                  a bootstrap of two equal images would have zero width
McNemar           exact two-sided test of gained = lost: binomial of gained among gained + lost, p = 1/2
bootstrap         paired, percentile, seeded; for any number per image

Formulas: docs/equations.md#paired-changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from steadygaze.errors import InputError

LEVEL = 0.95
Z = 1.959963984540054  # normal quantile of (1 + LEVEL) / 2


@dataclass(frozen=True)
class Accuracy:
    """A fraction of correct predictions in 0..1, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ClassChange:
    """One class before and after; difference = after − before, with its 95 % interval."""

    label: int
    count: int
    before: Accuracy
    after: Accuracy
    gained: int
    lost: int
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """ "gained" or "lost" where the interval excludes zero, otherwise "unclear"."""
        return "gained" if self.low > 0 else "lost" if self.high < 0 else "unclear"


def wilson(right: int, count: int) -> Accuracy:
    """Return the fraction of correct predictions with Wilson's 95 % interval.

    scipy.stats.binomtest gives the same interval, but takes a millisecond, and a run has thousands.

    Examples:
        >>> round(wilson(8, 10).low, 4), round(wilson(8, 10).high, 4)
        (0.4902, 0.9433)
    """
    if not 0 <= right <= count or count < 1:
        raise InputError(f"expected 0 <= right <= count and at least one image, got {right} of {count}")
    p, n = right / count, count
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return Accuracy(p, 0.0 if right == 0 else middle - half, 1.0 if right == count else middle + half)


def class_changes(labels: Any, before: Any, after: Any) -> list[ClassChange]:
    """Compare two models class by class.

    Args:
        labels (array of int): (N,), the class of each image.
        before (array of bool): (N,), whether the first model is correct.
        after (array of bool): (N,), the same of the second model.

    Returns:
        list[ClassChange]: the classes that lost most first, those that gained most last; ties by label.

    Examples:
        >>> changes = class_changes([0, 0, 1], [True, True, False], [True, False, True])
        >>> [(change.label, change.difference) for change in changes]
        [(0, -0.5), (1, 1.0)]
    """
    labels, before, after = np.asarray(labels), *_pair(before, after)
    if labels.shape != before.shape or labels.dtype.kind not in "iu":
        raise InputError(f"labels: expected {len(before)} class indices, got {labels.dtype} {labels.shape}")
    changes = []
    for label in np.unique(labels):
        a, b = before[labels == label], after[labels == label]
        both, gained, lost = int((a & b).sum()), int((~a & b).sum()), int((a & ~b).sum())
        neither = len(a) - both - gained - lost
        low, high = newcombe(both, gained, lost, neither)
        accuracy_before, accuracy_after = wilson(both + lost, len(a)), wilson(both + gained, len(a))
        changes.append(
            ClassChange(
                int(label),
                len(a),
                accuracy_before,
                accuracy_after,
                gained,
                lost,
                (gained - lost) / len(a),
                low,
                high,
            )
        )
    return sorted(changes, key=lambda c: (c.difference, c.label))


def newcombe(both: int, gained: int, lost: int, neither: int) -> tuple[float, float]:
    """Return the 95 % interval of the paired difference (gained − lost) / n."""
    n = both + gained + lost + neither
    after, before = wilson(both + gained, n), wilson(both + lost, n)
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    cross: float = both * neither - gained * lost
    if cross > 0:
        cross = max(cross - n / 2, 0)  # continuity, as Newcombe has it
    phi = cross / math.sqrt(margins) if margins else 0.0
    down, up = after.value - after.low, after.high - after.value
    down_before, up_before = before.value - before.low, before.high - before.value
    difference = after.value - before.value
    low = difference - math.sqrt(max(down**2 - 2 * phi * down * up_before + up_before**2, 0))
    high = difference + math.sqrt(max(up**2 - 2 * phi * up * down_before + down_before**2, 0))
    return max(low, -1.0), min(high, 1.0)


def turned(
    names: Sequence[str], before: Any, after: Any, *, limit: int | None = None
) -> dict[str, list[str]]:
    """Return the first images that turned "wrong" (lost) and "right" (gained), in the order of `names`.

    Examples:
        >>> turned(["a", "b", "c"], [True, False, True], [False, True, True])
        {'wrong': ['a'], 'right': ['b']}
    """
    a, b = _pair(before, after)
    if len(names) != len(a):
        raise InputError(f"names: expected one for each of {len(a)} images, got {len(names)}")
    lost, gained = (np.flatnonzero(which)[:limit] for which in (a & ~b, ~a & b))
    return {"wrong": [names[i] for i in lost], "right": [names[i] for i in gained]}


def mcnemar(before: Any, after: Any) -> float:
    """Return the exact two-sided p-value that gains and losses are equally likely; 1.0 if nothing changed.

    Examples:
        >>> mcnemar([False] * 6, [True] * 6)  # six images gained, none lost
        0.03125
    """
    a, b = _pair(before, after)
    gained, lost = int((~a & b).sum()), int((a & ~b).sum())
    if gained + lost == 0:
        return 1.0
    from scipy.stats import binomtest  # slow to import

    return float(binomtest(gained, gained + lost).pvalue)


def paired_difference(
    before: Any, after: Any, *, repeats: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the mean of after − before with the 95 % interval of a paired bootstrap: (value, low, high).

    Examples:
        >>> [round(float(x), 2) for x in paired_difference([0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0])]
        [0.25, 0.0, 0.75]
    """
    a, b = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a) or not np.isfinite(a + b).all():
        raise InputError(f"expected two finite numbers for each image, got shapes {a.shape} and {b.shape}")
    # drawing images is drawing how often each value comes
    values, times = np.unique(b - a, return_counts=True)
    taken = np.random.default_rng(seed).multinomial(len(a), times / len(a), size=repeats)
    low, high = np.percentile(taken @ values / len(a), [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float((b - a).mean()), float(low), float(high)


@dataclass(frozen=True)
class Spread:
    """One number over seeds: mean, standard deviation (n − 1; NaN for a single seed), range, count."""

    mean: float
    deviation: float
    low: float
    high: float
    seeds: int


def over_seeds(values: Sequence[float] | Float[np.ndarray, " n"]) -> Spread:
    """Summarize one measure over several seeds.

    Examples:
        >>> over_seeds([1.0, 2.0, 3.0])
        Spread(mean=2.0, deviation=1.0, low=1.0, high=3.0, seeds=3)
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise InputError(f"expected one finite number for each seed, at least one, got {values}")
    deviation = float(x.std(ddof=1)) if len(x) > 1 else float("nan")
    return Spread(float(x.mean()), deviation, float(x.min()), float(x.max()), len(x))


def _pair(before: Any, after: Any) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(before), np.asarray(after)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InputError(f"expected the same images, at least one, got shapes {a.shape} and {b.shape}")
    if not np.isin((a, b), (0, 1)).all():
        raise InputError(f"expected booleans, or 0 and 1, got {a[:5].tolist()} and {b[:5].tolist()}")
    return a.astype(bool), b.astype(bool)
