"""Training of a DiffMask file for a model and folders of images, resumed exactly where it stopped.

Training that diverges, as the paper warns it may, is detected and restarted if `restarts` allows it. What
every such run does is in `training/learnt/run.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from steadygaze.errors import BadCheckpoint
from steadygaze.methods.learnt.diffmask import DiffMask, read_file, write
from steadygaze.training.diffmask.settings import Settings
from steadygaze.training.diffmask.trainer import (
    ALL_OFF,
    ALL_ON,
    DivergenceMonitor,
    StepReport,
    Trainer,
    hidden_widths,
)
from steadygaze.training.learnt.run import LearntRequest, LearntResult, LearntRun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiffMaskRequest(LearntRequest):
    """What to train. options: values of `Settings`, on top of the presets.

    target: class name or index of a mask for one class
    warm_start: a mask of the same widths to start from
    restarts: number of new attempts after a divergence; restart_with: see `Settings.restarted`
    """

    presets: tuple[str, ...] = ()
    target: str | None = None
    warm_start: Path | None = None
    restarts: int = 0
    restart_with: str = "seed"


class DiffMaskRun(LearntRun[DiffMaskRequest, Trainer]):
    """A training of gates. Masks that end all on or all off are restarted too, if that is allowed."""

    what: ClassVar[str] = "a mask"
    stage: ClassVar[str] = "train gates"
    newer_options: ClassVar[frozenset[str]] = frozenset({"begin", "definition"})  # see `Settings.read`

    def prepare(self) -> None:
        request = self.request
        target = None if request.target is None else self.loaded.class_index(request.target)
        self.settings = Settings.of(*request.presets, **request.options, target=target)
        self.total_steps = self.steps_for(self.settings.batch)
        readable = self.images.load(self.images.files[:8])[:1]
        self.widths = hidden_widths(self.vit, readable.to(self.like))
        self.warm_start = None if request.warm_start is None else self._read_warm_start(request.warm_start)
        warm_start = None
        if self.warm_start is not None:
            content = b"".join(_bytes(parameter) for parameter in self.warm_start.parameters())
            warm_start = hashlib.sha256(content).hexdigest()[:16]
        self.identity = self.describe(self.settings, warm_start=warm_start)
        self.initial: StepReport | None = None
        self._start(self.settings)

    def _start(self, settings: Settings) -> None:
        self.trainer = Trainer(self.vit, settings, self.widths, self.warm_start)
        self.monitor = DivergenceMonitor(settings.grace_steps)
        self.problem = ""

    def _read_warm_start(self, path: Path) -> DiffMask:
        mask = read_file(path)[0]
        if mask.shape.widths != self.widths:
            raise BadCheckpoint(
                f"warm start: expected a mask for {len(self.widths)} states of widths "
                f"{_widths_text(self.widths)}, as this model has; {path} has {len(mask.shape.widths)} "
                f"of widths {_widths_text(mask.shape.widths)}"
            )
        return mask

    def read(self) -> tuple[Mapping[str, Any], tuple[DiffMask, dict[str, Tensor]]]:
        mask, facts, tensors = read_file(self.request.out)
        return facts, (mask, tensors)

    def restore(self, facts: Mapping[str, Any], rest: tuple[DiffMask, dict[str, Tensor]]) -> None:
        mask, tensors = rest
        self._start(Settings.read(facts["settings"]))
        self.trainer.restore(mask, facts, tensors)
        self.monitor.kind, self.monitor.count = facts["watch"]
        self.initial = StepReport(*facts["began"]) if facts.get("began") else None

    def facts(self) -> dict[str, Any]:
        return {
            "watch": [self.monitor.kind, self.monitor.count],
            "began": list(astuple(self.initial)) if self.initial else None,
        }

    def write(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        write(self.request.out, self.trainer.mask, facts, tensors)

    def before_first_step(self, sample: Tensor) -> None:
        self.initial = self.trainer.evaluate(sample)

    def check_step(self, report: StepReport) -> str:
        return self.monitor(report, self.trainer.steps)

    def finish(self, sample: Tensor) -> LearntResult:
        while True:
            self.train_steps(sample)
            report = self.trainer.evaluate(sample)
            state = "off" if report.l0 < ALL_OFF else "on" if report.l0 > ALL_ON else ""
            opening = self.trainer.settings.begin == "open" and self.trainer.steps <= self.monitor.grace
            too_early = not self.problem and state == "on" and opening
            at_end = f"the masks are {'still ' if too_early else ''}all {state}" if state else ""
            problem = self.problem or at_end
            if self.problem or not problem or too_early or self.attempt >= self.request.restarts:
                break
            self.problem = problem
        self.save(problem, too_early)
        return self.result(report, problem, too_early, self.initial)

    def restart(self) -> bool:
        """Start again after a divergence, if another attempt is allowed."""
        if self.attempt >= self.request.restarts:
            return False
        self.attempt += 1
        settings = self.trainer.settings.restarted(self.request.restart_with)
        log.warning(
            "step %d: %s. Restarting with seed %d, stretch %g",
            self.trainer.steps,
            self.problem,
            settings.seed,
            settings.stretch,
        )
        self._start(settings)
        self.resumed = 0
        self.report_progress()
        return True


def _widths_text(widths: tuple[int, ...]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else ", ".join(map(str, widths))


def _bytes(parameter: Tensor) -> bytes:
    return parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
