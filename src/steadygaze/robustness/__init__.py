"""Robustness of a model: corruptions, sequences, shifts, attacks, occlusion, segmentation, and its
attention under them."""

import warnings
from importlib import import_module
from typing import Any

_HOME = {  # public name -> module that holds it; imported on first use
    "corrupt": "corruptions.corrupt",
    "COMMON": "corruptions.corrupt",
    "EXTRA": "corruptions.corrupt",
    "CORRUPTIONS": "corruptions.corrupt",
    "SEVERITIES": "corruptions.corrupt",
    "sequence": "sequences",
    "PERTURBATIONS": "sequences",
    "corruption_scores": "scores",
    "mean_corruption_error": "scores",
    "relative_mean_corruption_error": "scores",
    "mean_error": "scores",
    "flip_probability": "scores",
    "mean_flip_rate": "scores",
    "top5_distance": "scores",
    "mean_top5_distance": "scores",
    "fgsm": "attacks",
    "pgd": "attacks",
    "centre_square": "occlusion",
    "random_drop": "occlusion",
    "salient_drop": "occlusion",
    "attention_measures": "attention",
    "attention_stability": "attention",
    "attention_figure": "attention",
    "features": "neighbours",
    "knn_predict": "neighbours",
    "knn_accuracy": "neighbours",
    "read_shift": "shifts",
    "read_clip": "clips",
    "shift_scores": "shifts",
    "any_correct": "shifts",
    "vary": "synthetic",
    "swap_background": "synthetic",
    "remove_background": "synthetic",
    "class_changes": "by_class",
    "turned": "by_class",
    "mcnemar": "by_class",
    "paired_difference": "by_class",
    "over_seeds": "by_class",
    "reliability": "calibration",
    "reliability_of": "calibration",
    "confusion": "segmentation",
    "iou": "segmentation",
    "miou": "segmentation",
    "pixel_accuracy": "segmentation",
    "label_map": "segmentation",
    "mean_miou": "segmentation",
    "retention": "segmentation",
    "CITYSCAPES_C": "segmentation",
}
_RENAMED = {"attention_picture": "attention_figure"}  # until version 0.3
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"{name} is now called {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _HOME:
        raise AttributeError(f"module 'steadygaze.robustness' has no attribute {name!r}")
    return getattr(import_module(f"steadygaze.robustness.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
