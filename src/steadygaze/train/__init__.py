"""Training that steadies a model's gaze: losses, masks, recipes, the loop. Called, `steadygaze.train(recipe, out)`, the package trains."""

import sys
from types import ModuleType
from typing import Any

__all__ = ["Recipe", "TrainingStopped", "losses", "masks", "read_recipe", "train"]

_HOME = {
    "train": "steadygaze.train.loop", "Trained": "steadygaze.train.loop", "Recipe": "steadygaze.train.recipes",
    "read_recipe": "steadygaze.train.reading", "TrainingStopped": "steadygaze.train.files",
}  # fmt: skip


class _Trains(ModuleType):
    """`sg.train` is this package and, called, the training of a recipe."""

    def __call__(self, *given: Any, **options: Any) -> Any:
        """See `steadygaze.train.loop.train`."""
        from steadygaze.train.loop import train

        return train(*given, **options)

    def __getattr__(self, name: str) -> Any:
        from importlib import import_module

        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        if name in ("losses", "masks", "recipes", "loop"):
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Trains
