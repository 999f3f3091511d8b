"""Accuracy on distribution shifts: other images of the same 1,000 classes (docs/equations.md#shift-accuracy).

`steadygaze.data.datasets.shifts` reads the published data sets.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steadygaze.data.datasets.shifts import Shift, Shifted, read_clip, read_shift
from steadygaze.errors import InputError

__all__ = ["any_correct", "read_clip", "read_shift", "shift_scores"]


def any_correct(
    logits: Float[Tensor, "b classes"],
    right: Sequence[Sequence[int]],
    *,
    k: int,
    classes: Sequence[int] | None = None,
) -> Bool[Tensor, " b"]:
    """Return whether any correct class is among the k highest logits; of equal logits, the lower index first.

    Args:
        logits (Tensor): (B, classes).
        right (Sequence[Sequence[int]]): the correct classes of each image, at least one.
        k (int): number of highest logits.
        classes (Sequence[int]): the classes that are compared; by default all.

    Examples:
        >>> any_correct(torch.tensor([[0.1, 0.7, 0.2]]), [[0, 2]], k=2)
        tensor([True])
    """
    columns = logits.shape[1] if classes is None else len(classes)
    highest = max((c for row in (*right, classes or ()) for c in row), default=-1)
    if highest >= logits.shape[1] or len(right) != len(logits) or not all(right):
        raise InputError(f"expected classes in 0..{logits.shape[1] - 1}, at least one each, got {highest}")
    if not 1 <= k <= columns:
        raise InputError(f"k: expected 1..{columns}, got {k}")
    chosen = torch.tensor(list(range(columns) if classes is None else classes), device=logits.device)
    best = chosen[logits[:, chosen].argsort(dim=1, descending=True, stable=True)[:, :k]]
    most = max(len(row) for row in right)
    padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in right], device=logits.device)
    return (best[:, :, None] == padded[:, None]).any(2).any(1)


def shift_scores(
    logits: Float[Tensor, "b classes"], items: Sequence[Shifted], shift: Shift
) -> dict[str, Bool[Tensor, " b"]]:
    """Return whether each image is classified correctly, by protocol: "top1 of 1000", "top5 of 200", ...

    Examples:
        >>> from pathlib import Path
        >>> shift = Shift("mine", [Shifted("a.jpg", Path("a.jpg"), label=2, right=(2, 3))])
        >>> shift_scores(torch.eye(1000)[[3]], shift.items, shift)
        {'top1 of 1000': tensor([True]), 'top5 of 1000': tensor([True])}
    """
    right = [item.right for item in items]
    protocols = [None] if shift.classes is None else [None, shift.classes]
    out = {}
    for classes in protocols:
        columns = logits.shape[1] if classes is None else len(classes)
        for k in (1, 5):
            out[f"top{k} of {columns}"] = any_correct(logits, right, k=min(k, columns), classes=classes)
    return out
