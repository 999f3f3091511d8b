"""Training: recipes, losses, the loop; learnt explanation methods and TokenCut masks.

| module          | content                                                                              |
| --------------- | ------------------------------------------------------------------------------------ |
| loop            | `train`: steps, log, tests, checkpoints; result is what it reports and returns       |
| setup           | everything the steps need, made from a recipe                                        |
| recipe          | what a recipe may hold; recipe_files reads it, recipe_errors explains what is wrong  |
| model           | from a recipe to the model that is trained                                           |
| images/         | selection, loading and augmentation of images, and which of them make a step         |
| losses/         | one file for each loss, and their registry                                           |
| objective       | the weighted sum of a recipe's losses                                                |
| optimisation    | accelerator, optimiser, schedule, weight average                                     |
| evaluation      | test loss and accuracy                                                               |
| run_files       | the files of a run                                                                   |
| recipes/        | the recipes that ship with the package                                               |
| sweeps/         | grids of recipes, and those that ship with the package                               |
| learnt/         | what the trainings of learnt explanation methods share: images, the resumable run    |
| diffmask/       | training of Vision DiffMask gates                                                    |
| shapley/        | training of ViT-Shapley explainers                                                   |
| tokencut/       | object masks without labels                                                          |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported on first use
    from steadygaze.training.loop import train as train
    from steadygaze.training.losses import Loss as Loss
    from steadygaze.training.losses import LossBatch as LossBatch
    from steadygaze.training.losses import LossOptions as LossOptions
    from steadygaze.training.recipe import Recipe as Recipe
    from steadygaze.training.recipe_files import read_recipe as read_recipe
    from steadygaze.training.result import TrainingProgress as TrainingProgress
    from steadygaze.training.result import TrainingResult as TrainingResult
    from steadygaze.training.run_files import TrainingStopped as TrainingStopped

_MODULES = {
    "Loss": "losses",
    "LossBatch": "losses",
    "LossOptions": "losses",
    "Recipe": "recipe",
    "TrainingProgress": "result",
    "TrainingResult": "result",
    "TrainingStopped": "run_files",
    "read_recipe": "recipe_files",
    "train": "loop",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
