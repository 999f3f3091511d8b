"""Accuracy by group, from its definition: docs/equations.md#worst-group."""

from collections.abc import Mapping


def accuracies(correct: Mapping[str, bool], groups: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """For each group, the number of correct predictions and of images."""
    found: dict[str, tuple[int, int]] = {}
    for image, group in groups.items():
        right, count = found.get(group, (0, 0))
        found[group] = (right + int(correct[image]), count + 1)
    return found
