"""Training of a ViT-Shapley file for a model and folders of images, resumed exactly where it stopped.

What every such run does is in `training/learnt/run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from torch import Tensor

from steadygaze.methods.learnt.shapley import Explainer, read_file, write
from steadygaze.training.learnt.run import LearntRequest, LearntResult, LearntRun
from steadygaze.training.shapley.settings import Settings
from steadygaze.training.shapley.trainer import StepReport, Trainer


@dataclass(frozen=True)
class ShapleyRequest(LearntRequest):
    """What to train. options: values of `Settings`; steps: of the explainer, after those of the surrogate."""


class ShapleyRun(LearntRun[ShapleyRequest, Trainer]):
    """A training of an explainer, after that of its surrogate if there is one."""

    what: ClassVar[str] = "an explainer"
    stage: ClassVar[str] = "train explainer"

    def prepare(self) -> None:
        self.settings = Settings.of(**self.request.options)
        self.total_steps = self.settings.first_steps + self.steps_for(self.settings.batch)
        self.trainer = Trainer(self.vit, self.settings)
        self.identity = self.describe(self.settings)

    def read(self) -> tuple[Mapping[str, Any], tuple[Explainer, dict[str, Tensor]]]:
        explainer, facts, tensors = read_file(self.request.out)
        return facts, (explainer, tensors)

    def restore(self, facts: Mapping[str, Any], rest: tuple[Explainer, dict[str, Tensor]]) -> None:
        explainer, tensors = rest
        self.trainer.restore(explainer, facts, tensors)

    def write(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        write(self.request.out, self.trainer.explainer, facts, tensors)

    def check_step(self, report: StepReport) -> str:
        return "" if isfinite(report.loss) else "the loss is not finite"

    def finish(self, sample: Tensor) -> LearntResult:
        self.train_steps(sample)
        report = self.trainer.evaluate(sample)
        explains = report.explained > 0
        problem = self.problem or ("" if explains else "it explains no more than equal shares of all patches")
        too_early = bool(problem) and not self.problem
        self.save(problem, too_early)
        return self.result(report, problem, too_early)
