"""Accuracy by group of images, and of the worst group (docs/equations.md#worst-group).

S. Sagawa, P. W. Koh, T. B. Hashimoto, P. Liang: Distributionally Robust Neural Networks for Group Shifts,
ICLR 2020, arXiv:1911.08731. A group is a value of an attribute, or a class together with it (waterbirds on
land): a model that relies on a shortcut is accurate on average and fails where the shortcut is absent.

| symbol | here |
| --- | --- |
| 1[f(x) = y] | correct |
| g | groups |
| acc_g | group_accuracy |
| min_g acc_g | worst_group |
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from steadygaze.errors import InputError
from steadygaze.robustness.by_class import Accuracy, wilson


def group_accuracy(correct: Any, groups: Sequence[Any]) -> dict[Any, Accuracy]:
    """Return the accuracy of each group with Wilson's 95 % interval, sorted by group.

    Args:
        correct (array of bool): (N,), whether each prediction is correct.
        groups (sequence): the group of each image.

    Examples:
        >>> {g: a.value for g, a in group_accuracy([1, 1, 0, 1], ["land", "land", "water", "water"]).items()}
        {'land': 1.0, 'water': 0.5}
    """
    values = np.asarray(correct)
    if values.ndim != 1 or len(values) != len(groups) or not len(values):
        raise InputError(f"expected a group for each of {len(values)} images, got {len(groups)}")
    if not np.isin(values, (0, 1)).all():
        raise InputError(f"correct: expected booleans, or 0 and 1, got {values[:5].tolist()}")
    names, codes = np.unique(np.asarray(groups), return_inverse=True)
    right, count = np.bincount(codes, values), np.bincount(codes)
    return {name: wilson(int(right[i]), int(count[i])) for i, name in enumerate(names.tolist())}


def worst_group(correct: Any, groups: Sequence[Any]) -> tuple[Any, Accuracy]:
    """Return the group with the lowest accuracy, the first of equal ones, and its accuracy.

    Examples:
        >>> worst_group([1, 1, 0, 1], ["land", "land", "water", "water"])[0]
        'water'
    """
    accuracies = group_accuracy(correct, groups)
    name = min(accuracies, key=lambda group: accuracies[group].value)
    return name, accuracies[name]
