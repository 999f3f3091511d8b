"""How a model holds up: corruptions, perturbation sequences and their scores."""

from importlib import import_module
from typing import Any

_HOME = {  # public name -> module that holds it; imported on first use
    "corrupt": "corruptions",
    "COMMON": "corruptions",
    "EXTRA": "corruptions",
    "CORRUPTIONS": "corruptions",
    "SEVERITIES": "corruptions",
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
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'steadygaze.robustness' has no attribute {name!r}")
    return getattr(import_module(f"steadygaze.robustness.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
