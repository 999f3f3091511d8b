"""steadygaze: see what a vision transformer looks at, test whether that explanation is true, and steady its gaze."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {  # public name -> module that holds it; imported on first use, so that `import steadygaze` stays quick
    "adapt": "steadygaze.vit",
    "ViT": "steadygaze.vit",
    "load_model": "steadygaze.vit.load",
    "explain": "steadygaze.explainer",
    "method": "steadygaze.methods",
    "Attribution": "steadygaze.heatmap",
    "verify": "steadygaze.runs.verify",
    "stress": "steadygaze.runs.stress",
    "Rows": "steadygaze.runs.rows",
    "SteadygazeError": "steadygaze.errors",
    "UnsupportedModel": "steadygaze.errors",
    "MethodUnavailable": "steadygaze.errors",
    "UnknownName": "steadygaze.errors",
    "BadInput": "steadygaze.errors",
    "BadImage": "steadygaze.errors",
    "BadCheckpoint": "steadygaze.errors",
    "BrokenMap": "steadygaze.errors",
    "DegenerateMap": "steadygaze.errors",
}
_PACKAGES = ("methods", "robustness")  # sg.methods, called, lists the methods; sg.robustness.corrupt and its like
__all__ = [*_HOME, *_PACKAGES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"steadygaze.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'steadygaze' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
