"""Shapley values by their definition, and the metrics against true importance, one image at a time."""

from itertools import combinations
from math import factorial

import numpy as np
from scipy.stats import rankdata


def shapley_values(players, value):
    """Σ_S |S|! (n − |S| − 1)! / n! · (v(S ∪ i) − v(S)) over all S without i; value: frozenset -> float."""
    n = len(players)
    result = {}
    for i in players:
        others = [p for p in players if p != i]
        result[i] = sum(
            factorial(size) * factorial(n - size - 1) / factorial(n) * (value(s | {i}) - value(s))
            for size in range(n)
            for s in map(frozenset, combinations(others, size))
        )
    return result


def correlation(scores, true):
    scores, true = np.ravel(scores).astype(float), np.ravel(true).astype(float)
    return 0.0 if np.ptp(scores) == 0 else float(np.corrcoef(scores, true)[0, 1])


def rank_of_the_most_important(scores, true):
    position = rankdata(-np.ravel(scores))
    top = position[np.ravel(true) == np.max(true)]
    return float(top.mean() - (len(top) - 1) / 2)
