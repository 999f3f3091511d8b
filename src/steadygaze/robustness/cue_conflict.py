"""Shape bias: which cue decides if shape and texture are of different classes.

Formulas: docs/equations.md#shape-bias.

Geirhos et al., "ImageNet-trained CNNs are biased towards texture; increasing shape bias improves accuracy and
robustness", ICLR 2019.

    p_g        = mean over the ImageNet classes c of group g of softmax(logits)_c
    decision   = argmax_g p_g
    shape bias = #(decision = shape) / #(decision = shape or decision = texture)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import InputError


def group_decisions(logits: Float[Tensor, "b classes"], groups: Sequence[Sequence[int]]) -> Int[Tensor, " b"]:
    """The group of classes with the highest mean probability; of equal ones the first.

    Examples:
        >>> group_decisions(torch.tensor([[2.0, 1.5, 1.6]]), [[0, 1], [2]]).tolist()
        [0]
    """
    highest = max((c for group in groups for c in group), default=-1)
    if not groups or not all(groups) or highest >= logits.shape[1]:
        raise InputError(
            f"groups: expected classes from 0 to {logits.shape[1] - 1} for each, got the highest {highest}"
        )
    p = logits.double().softmax(1)
    means = torch.stack([p[:, list(group)].mean(1) for group in groups], 1)
    return means.argmax(1)


def shape_bias(
    decision: Int[np.ndarray, " n"], shape: Int[np.ndarray, " n"], texture: Int[np.ndarray, " n"]
) -> float:
    """The share of shape decisions among those for one of the two cues, 0 to 1; NaN if there is none.

    Examples:
        >>> shape_bias(np.array([0, 1, 2, 0]), np.array([0, 0, 0, 0]), np.array([1, 1, 1, 1]))
        0.6666666666666666
    """
    by_shape, by_texture = int((decision == shape).sum()), int((decision == texture).sum())
    decided = by_shape + by_texture
    return by_shape / decided if decided else float("nan")
