"""Training that steadies a model's gaze: losses, masks, recipes and the loop."""

from importlib import import_module
from typing import Any

_HOME = {
    "train": "steadygaze.training.loop",
    "Trained": "steadygaze.training.loop",
    "Recipe": "steadygaze.training.recipe",
    "read_recipe": "steadygaze.training.recipe_files",
    "TrainingStopped": "steadygaze.training.run_files",
}
__all__ = ["Recipe", "Trained", "TrainingStopped", "read_recipe", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
