"""Images whose shape and texture are of different classes, and which of the two determines the prediction."""

from steadygaze.robustness.cue_conflict.images import (
    IMAGENET_CLASSES,
    CueConflict,
    CueItem,
    read_cue_conflict,
    sixteen_classes,
)
from steadygaze.robustness.cue_conflict.shape_bias import group_decisions, shape_bias

__all__ = [
    "IMAGENET_CLASSES",
    "CueConflict",
    "CueItem",
    "group_decisions",
    "read_cue_conflict",
    "shape_bias",
    "sixteen_classes",
]
