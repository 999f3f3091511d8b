"""How well a score separates images of the data from others (docs/equations.md#ood); the scores: `ood.py`."""

from typing import Any

import numpy as np

from steadygaze.errors import InputError

SHARE = 0.95  # of the images of the data that are accepted


def auroc(inside: Any, outside: Any, *, inside_weights: Any = None, outside_weights: Any = None) -> float:
    """Return the area under the ROC curve, 0..1; 0.5 is chance, higher is better.

    Args:
        inside (array): (N,), scores of images of the data.
        outside (array): (M,), scores of the other images.
        inside_weights (array): (N,), how often each image counts; default: once.
        outside_weights (array): (M,), the same.

    Examples:
        >>> auroc([0.9, 0.8, 0.3], [0.5, 0.1])
        0.8333333333333334
    """
    (high, own), (low, other) = _checked(inside, inside_weights), _checked(outside, outside_weights)
    order = np.argsort(low, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(other[order])])  # weight of the lowest 0, 1, ... of outside
    less, at_most = (np.searchsorted(low[order], high, side) for side in ("left", "right"))
    wins = (below[less] + below[at_most]) / 2
    return float(own @ wins / (own.sum() * other.sum()))


def fpr95(inside: Any, outside: Any, *, inside_weights: Any = None, outside_weights: Any = None) -> float:
    """Return the share of the other images that are accepted where 95 % of the data is; lower is better.

    Args and shapes as in `auroc`.

    Examples:
        >>> fpr95([0.9, 0.8, 0.3], [0.5, 0.1])
        0.5
    """
    (high, own), (low, other) = _checked(inside, inside_weights), _checked(outside, outside_weights)
    order = np.argsort(-high, kind="stable")
    accepted = np.cumsum(own[order])
    threshold = high[order][np.searchsorted(accepted, SHARE * accepted[-1] - 1e-9)]
    return float(other[low >= threshold].sum() / other.sum())


def _checked(scores: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values) or np.isnan(values).any():
        raise InputError(
            f"expected a score for each image, at least one, without NaN, got shape {values.shape}"
        )
    times = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)
    if times.shape != values.shape or (times < 0).any() or not times.sum():
        raise InputError(f"weights: expected one of 0 or more for each of {len(values)} scores")
    return values, times
