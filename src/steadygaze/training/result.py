"""What a training run reports while it runs, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from steadygaze.progress import Progress
from steadygaze.training.recipe import Recipe


@dataclass(frozen=True)
class TrainingProgress(Progress):
    """Reported after every logged step and every test.

    epoch: the current one, from 1; epochs: in all
    lr: learning rate
    values: the loss and its terms, averaged since the previous row; after a test also test_loss and test_top1
        (or test_miou)
    seconds: that training took so far, over all resumed parts

    >>> progress = TrainingProgress("train", 20, 100, "steps", epoch=1, values={"loss": 2.3})
    >>> progress.done, progress.values["loss"]
    (20, 2.3)
    """

    epoch: int = 0
    epochs: int = 0
    lr: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The result of `train`.

    folder: of the run; `load_model` accepts it as a name
    weights: the file of the weights, for `load_model(name, checkpoint=...)`
    model: with these weights, in eval mode
    log: the rows of log.csv
    notes: what the user should know, also logged as warnings
    steps: that this call took; 0 if the run had finished before
    unreadable: files of images that were skipped because they do not decode

    Example:

        result = sg.train("cifar10-tap", "runs/tap")
        loaded = sg.load_model(result.folder)
    """

    folder: Path
    weights: Path
    model: nn.Module
    recipe: Recipe
    log: list[dict[str, str]]
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    unreadable: list[str] = field(default_factory=list)

    @property
    def top1(self) -> float | None:
        """Accuracy on the test images of the weights that were kept (last or best epoch), 0..1; None if not
        tested."""
        return self._of_kept_weights("test_top1")

    @property
    def miou(self) -> float | None:
        """The same for segmentation: mean intersection over union, 0..1."""
        return self._of_kept_weights("test_miou")

    def _of_kept_weights(self, column: str) -> float | None:
        rows = [row for row in self.log if row.get(column)]
        if not rows:
            return None
        if self.recipe.keep == "best":
            return float(min(rows, key=lambda row: float(row["test_loss"]))[column])
        return float(rows[-1][column])
