"""Sweeps: training runs, each with a stress run inside its folder, and the table of their numbers.

    OUT/losses.adl.tau=1/seed0/            a run of `steadygaze train`, accepted wherever a model is
    OUT/losses.adl.tau=1/seed0/stress/     a run of `steadygaze stress` of its weights
    OUT/losses.adl.tau=1/seed0/measured.json      that it is complete, and how it was measured

Nothing else is stored: what is there is recognized by its own files, so a killed sweep is repeated, shards
share a folder, and a larger grid keeps the runs of a smaller one.

The value of a cell is the mean over its seeds. Its 95 % interval is a bootstrap over both: in every draw the
images are drawn with replacement, the same for all runs, and so are the seeds. With one seed it is the
interval over images alone. Differences to the first cell use the same draws of images and seeds, and are
paired: seed 0 of a cell with seed 0 of the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.files import write_atomic
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.quantity import Quantity
from steadygaze.runs.card import Card, Key
from steadygaze.runs.request import StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import WHOLE, Shard
from steadygaze.runs.statistics import interval
from steadygaze.runs.stress import parse_suites, run_stress
from steadygaze.training.loop import train
from steadygaze.training.recipe import Recipe
from steadygaze.training.run_files import TrainingStoppedError, holds_run
from steadygaze.training.sweep import Cell, Sweep
from steadygaze.untrusted import damaged_files, read_text

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
    def request(self) -> StressRequest:
        """The stress run of its weights."""
        recipe, measure = self.recipe, self.recipe.measure
        masks = measure.masks
        if masks is None and measure.data is None and recipe.data.test_masks != "tokencut":
            masks = recipe.data.test_masks
        default = ["segmentation" if recipe.task == "segmentation" else "corruptions"]
        return StressRequest(
            model=str(self.folder),
            data=measure.data or recipe.data.test,
            out=self.rows,
            suites=default if measure.suites is None else measure.suites,
            options=measure.options,
            masks=None if masks is None else Path(masks),
            limit=measure.limit,
            seed=measure.seed,
            batch_size=measure.batch,
        )

    @property
    def measure(self) -> dict[str, Any]:
        """What defines the stress run, as measured.json records it."""
        request = self.request
        keys = ("suites", "data", "masks", "limit", "seed", "options")
        return json.loads(json.dumps({key: getattr(request, key) for key in keys}, default=str))

    def is_done(self) -> bool:
        """Whether it is trained and measured; a run of another recipe in its folder is refused."""
        if not holds_run(self.folder, self.recipe.settings):
            return False
        try:
            content = json.loads(read_text(self.folder / MEASURED))
        except (OSError, ValueError, RecursionError):
            return False
        if content != self.measure:
            raise InputError(
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
            if not recipe.data.train:
                raise InputError("data.train: expected a folder of images. Add --set data.train=FOLDER.")
            run = SweepRun(cell, recipe, out / cell.folder / f"seed{recipe.seed}")
            suites = parse_suites(run.request.suites, run.request.options)
            if run.request.data is None and not all(suite.own_images for suite in suites):
                raise InputError(
                    "measure.data: expected images to measure the models on. Give measure.data, or data.test."
                )
            runs.append(run)
    return runs


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
        raise InputError(
            "a sweep runs in one process, got several. Start independent ones with --shard 0/2, --shard 1/2."
        )
    own = [run for number, run in enumerate(runs) if shard.owns(number)]
    remaining = [run for run in own if not run.is_done()]
    resumed, result = len(own) - len(remaining), SweepResult()
    shared: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    for number, run in enumerate(remaining):
        on_progress(Progress("sweep", resumed + number, len(own), "runs", resumed, run.label))
        recipe = run.recipe.model_copy(update={"command": command})
        try:
            trained = train(recipe, run.folder, on_progress=on_progress, **shared)
        except TrainingStoppedError as error:
            result.failed[run.label] = str(error)
            continue
        request = replace(run.request, command=command, **shared)
        rows = run_stress(request, on_progress=on_progress)
        result.unreadable += len(trained.unreadable) + len(rows.unreadable)
        write_atomic(run.folder / MEASURED, json.dumps(run.measure, indent=2) + "\n")
    on_progress(Progress("sweep", len(own), len(own), "runs", resumed))
    return result


Limits = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class SweepNumber:
    """One number of one cell.

    Attributes:
        value: Mean over seeds.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
        difference: To the first cell, with its interval; None of the first itself and where images differ.
        seeds: Number of runs that it is the mean of.
        images: Number of images of each run.
    """

    cell: str
    setting: str
    quantity: Quantity
    value: float
    low: float
    high: float
    difference: Limits | None
    seeds: int
    images: int

    @property
    def title(self) -> str:
        """The number's name for people."""
        unit = f", {self.quantity.unit}" if self.quantity.unit else ""
        return f"{self.setting}: {self.quantity.title}{unit}{self.quantity.arrow}"

    @property
    def verdict(self) -> str:
        """better or worse than the first cell, where the interval excludes zero; otherwise empty."""
        if self.difference is None or not (self.difference[1] > 0 or self.difference[2] < 0):
            return ""
        sign = self.difference[0] * self.quantity.sign
        return "better" if sign > 0 else "worse" if sign < 0 else ""

    def record(self) -> dict[str, Any]:
        gap = self.difference or (float("nan"),) * 3
        return {
            "cell": self.cell,
            "setting": self.setting,
            "metric": self.quantity.name,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "difference": gap[0],
            "difference_low": gap[1],
            "difference_high": gap[2],
            "verdict": self.verdict,
            "seeds": self.seeds,
            "images": self.images,
        }


@dataclass(frozen=True)
class SweepTable:
    """The numbers of all cells that have a finished run, number by number in the order of cells.

    Attributes:
        missing: The runs that are not finished.
    """

    numbers: Sequence[SweepNumber]
    missing: Sequence[str]

    @property
    def titles(self) -> list[str]:
        return list(dict.fromkeys(number.title for number in self.numbers))

    def of(self, title: str) -> list[SweepNumber]:
        """One number of every cell."""
        return [number for number in self.numbers if number.title == title]


def summarize(runs: Sequence[SweepRun], repeats: int = 2000) -> SweepTable:
    """The table of the runs that are finished."""
    done = [run for run in runs if run.is_done()]
    cards: dict[str, dict[int, Card]] = {}
    with damaged_files(*(run.rows for run in done)):
        for run in done:
            card = Rows.read(run.rows).cards(repeats=repeats)[0]
            cards.setdefault(run.cell.label, {})[run.recipe.seed] = card
        keys = _shown(cards, runs[0].recipe.measure.show) if done else []
        order = [label for label in dict.fromkeys(run.cell.label for run in runs) if label in cards]
        numbers = [
            _number(label, key, cards[label], cards[order[0]] if label != order[0] else {})
            for key in keys
            for label in order
        ]
    missing = [run.label for run in runs if run not in done]
    return SweepTable(numbers, missing)


def _shown(cards: Mapping[str, Mapping[int, Card]], show: Sequence[str] | None) -> list[Key]:
    """What every run has of the chosen numbers; without a choice, of those at the top of a report."""
    every = [card for seeds in cards.values() for card in seeds.values()]
    shared = [key for key in every[0].numbers if all(key in card.numbers for card in every)]
    if show is None:
        top = {key for suite in every[0].suites for key in suite.tiles}
        return [key for key in shared if key in top or every[0].numbers[key].headline]
    known = {f"{setting}/{metric}": (setting, metric) for setting, metric in shared}
    for name in show:
        if name not in known:
            raise UnknownNameError("number of measure.show", name, known)
    return [known[name] for name in show]


def _number(label: str, key: Key, own: Mapping[int, Card], first: Mapping[int, Card]) -> SweepNumber:
    numbers = {seed: card.numbers[key] for seed, card in own.items()}
    reference = {seed: card.numbers[key] for seed, card in first.items()}
    number = next(iter(numbers.values()))
    if len({n.images for n in numbers.values()}) > 1:
        raise InputError(
            f"{label}: its seeds were measured on different numbers of images. Measure them again."
        )
    value, low, high = _mean_over_seeds([numbers[seed].samples for seed in sorted(numbers)])
    if len(numbers) == 1:  # Wilson's of an accuracy
        low, high = number.low, number.high
    both = sorted(numbers.keys() & reference.keys())
    same_images = len({n.images for n in (*numbers.values(), *reference.values())}) == 1
    difference = None
    if both and same_images:
        difference = _mean_over_seeds([numbers[seed].samples - reference[seed].samples for seed in both])
    return SweepNumber(
        label,
        number.setting.label,
        number.quantity,
        value,
        low,
        high,
        difference,
        len(numbers),
        number.images,
    )


def _mean_over_seeds(samples: Sequence[Float[np.ndarray, " draws"]]) -> Limits:
    """The mean over seeds with its 95 % interval; the first sample of each seed is the value itself."""
    stacked = np.stack(samples)
    seeds, draws = stacked.shape[0], stacked.shape[1] - 1
    drawn = np.random.default_rng(0).integers(0, seeds, (seeds, draws))
    low, high = interval(np.take_along_axis(stacked[:, 1:], drawn, axis=0).mean(0))
    return float(stacked[:, 0].mean()), float(low), float(high)
