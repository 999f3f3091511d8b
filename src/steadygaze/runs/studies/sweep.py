"""The runs of a sweep: each is a training run with a stress run inside its folder.

    OUT/losses.adl.tau=1/seed0/            a run of `steadygaze train`, accepted wherever a model is
    OUT/losses.adl.tau=1/seed0/stress/     a run of `steadygaze stress` of its weights
    OUT/losses.adl.tau=1/seed0/measured.json      that it is complete, and how it was measured

Nothing else is stored: what is there is recognised by its own files, so a killed sweep is repeated, shards
share a folder, and a larger grid keeps the runs of a smaller one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput
from steadygaze.files import write_atomic
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards.shard import WHOLE, Shard
from steadygaze.runs.stress.parse import parse_suites
from steadygaze.runs.stress.request import StressRequest, run_stress
from steadygaze.training.loop import train
from steadygaze.training.recipe import Recipe
from steadygaze.training.run_files import TrainingStopped, holds_run
from steadygaze.training.sweeps import Cell, Sweep

STRESS, MEASURED = "stress", "measured.json"


@dataclass(frozen=True)
class SweepRun:
    """One recipe with one seed, and the folder of its run."""

    cell: Cell
    recipe: Recipe
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.cell.label}, seed {self.recipe.seed}"

    @property
    def rows(self) -> Path:
        """The folder of its stress run."""
        return self.folder / STRESS

    @property
    def measure(self) -> dict[str, Any]:
        """What defines the stress run, as measured.json records it."""
        described = self.recipe.measure.model_dump(exclude={"show", "batch"})
        chosen = {"suites": self.suites, "data": self.data, "masks": self.masks}
        return json.loads(json.dumps({**described, **chosen}))

    @property
    def suites(self) -> list[str]:
        default = ["segmentation" if self.recipe.task == "segmentation" else "corruptions"]
        return default if self.recipe.measure.suites is None else self.recipe.measure.suites

    @property
    def data(self) -> str | None:
        return self.recipe.measure.data or self.recipe.data.test

    @property
    def masks(self) -> str | None:
        measure, test_masks = self.recipe.measure, self.recipe.data.test_masks
        if measure.masks is not None or measure.data is not None or test_masks == "tokencut":
            return measure.masks
        return test_masks

    def is_done(self) -> bool:
        """Whether it is trained and measured; a run of another recipe in its folder is refused."""
        if not holds_run(self.folder, self.recipe.settings):
            return False
        try:
            content = json.loads((self.folder / MEASURED).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        if content != self.measure:
            raise BadInput(
                f"{self.folder} was measured with other settings: expected {self.measure}, got {content}. "
                f"Use the same [measure], another output folder, or remove {MEASURED} and {STRESS}/ in it."
            )
        return True


@dataclass
class SweepResult:
    """What a call did: the folders of runs that could not be trained, with reasons, and how many images could
    not be read."""

    failed: dict[str, str] = field(default_factory=dict)
    unreadable: int = 0


def plan_runs(sweep: Sweep, out: Path) -> list[SweepRun]:
    """All runs, checked before anything is written; the first seed of every cell comes first."""
    cells = sweep.cells()
    runs = []
    for number in range(sweep.seeds):
        for cell in cells:
            recipe = sweep.recipe_of(cell, number)
            runs.append(SweepRun(cell, recipe, out / cell.folder / f"seed{recipe.seed}"))
    for run in runs:
        _check(run)
    return runs


def _check(run: SweepRun) -> None:
    if not run.recipe.data.train:
        raise BadInput("data.train: expected a folder of images. Add --set data.train=FOLDER.")
    suites = parse_suites(run.suites, run.recipe.measure.options)
    if run.data is None and not all(suite.own_images for suite in suites):
        raise BadInput(
            "measure.data: expected images to measure the models on. Give measure.data, or data.test."
        )


def run_sweep(
    runs: Sequence[SweepRun],
    *,
    shard: Shard = WHOLE,
    device: str = "auto",
    command: str = "",
    trust_remote_code: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> SweepResult:
    """Train and measure what is not there yet. If the training of a run stops, the others continue."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadInput(
            "a sweep runs in one process, got several. Start independent ones with --shard 0/2, --shard 1/2."
        )
    own = [run for number, run in enumerate(runs) if shard.owns(number)]
    left = [run for run in own if not run.is_done()]
    resumed, result = len(own) - len(left), SweepResult()
    for number, run in enumerate(left):
        on_progress(Progress("sweep", resumed + number, len(own), "runs", resumed, run.label))
        recipe = run.recipe.model_copy(update={"command": command})
        try:
            trained = train(
                recipe,
                run.folder,
                device=device,
                on_progress=on_progress,
                trust_remote_code=trust_remote_code,
            )
        except TrainingStopped as error:
            result.failed[run.label] = str(error)
            continue
        rows = _measure(run, device, command, on_progress, trust_remote_code=trust_remote_code)
        result.unreadable += len(trained.unreadable) + len(rows.unreadable)
        write_atomic(run.folder / MEASURED, json.dumps(run.measure, indent=2) + "\n")
    on_progress(Progress("sweep", len(own), len(own), "runs", resumed))
    return result


def _measure(
    run: SweepRun, device: str, command: str, on_progress: OnProgress, *, trust_remote_code: bool
) -> Rows:
    measure = run.recipe.measure
    request = StressRequest(
        model=str(run.folder),
        data=run.data,
        out=run.rows,
        suites=run.suites,
        options=measure.options,
        masks=None if run.masks is None else Path(run.masks),
        limit=measure.limit,
        seed=measure.seed,
        batch_size=measure.batch,
        device=device,
        command=command,
        trust_remote_code=trust_remote_code,
    )
    return run_stress(request, on_progress=on_progress)
