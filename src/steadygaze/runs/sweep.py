"""The runs of a sweep: each is a training run with a stress run inside its folder.

    OUT/losses.adl.tau=1/seed0/            a run of `steadygaze train`, accepted wherever a model is
    OUT/losses.adl.tau=1/seed0/stress/     a run of `steadygaze stress` of its weights
    OUT/losses.adl.tau=1/seed0/measured.json      that it is complete, and how it was measured

Nothing else is stored: what is there is recognized by its own files, so a killed sweep is repeated, shards
share a folder, and a larger grid keeps the runs of a smaller one.

The numbers of a sweep, with intervals over seeds and images.

The value of a cell is the mean over its seeds. Its 95 % interval is a bootstrap over both: in every draw the
images are drawn with replacement, the same for all runs, and so are the seeds. With one seed it is the
interval over images alone. Differences to the first cell use the same draws of images and seeds, and are
paired: seed 0 of a cell with seed 0 of the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.files import write_atomic
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.quantity import Quantity
from steadygaze.runs.card import Card, Key
from steadygaze.runs.rows import Rows
from steadygaze.runs.settings import Number
from steadygaze.runs.shards import WHOLE, Shard
from steadygaze.runs.statistics import interval
from steadygaze.runs.stress import StressRequest, parse_suites, run_stress
from steadygaze.training.loop import train
from steadygaze.training.recipe import Recipe
from steadygaze.training.run_files import TrainingStoppedError, holds_run
from steadygaze.training.sweep import Cell, Sweep
from steadygaze.untrusted import damaged_files

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
            runs.append(SweepRun(cell, recipe, out / cell.folder / f"seed{recipe.seed}"))
    for run in runs:
        _check(run)
    return runs


def _check(run: SweepRun) -> None:
    if not run.recipe.data.train:
        raise InputError("data.train: expected a folder of images. Add --set data.train=FOLDER.")
    suites = parse_suites(run.suites, run.recipe.measure.options)
    if run.data is None and not all(suite.own_images for suite in suites):
        raise InputError(
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
        raise InputError(
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
        except TrainingStoppedError as error:
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


NAN = float("nan")
Limits = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class SweepNumber:
    """One number of one cell.

    value, low, high: mean over seeds, with its 95 % interval
    difference: to the first cell, with its interval; None of the first itself and where images differ
    seeds: how many runs it is the mean of           images: of each
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
        gap = self.difference or (NAN, NAN, NAN)
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

    missing: the runs that are not finished
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
    one = next(iter(numbers.values()))
    if len({number.images for number in numbers.values()}) > 1:
        raise InputError(
            f"{label}: its seeds were measured on different numbers of images. Measure them again."
        )
    samples = _samples(numbers)
    low, high = _limits(samples)
    if len(numbers) == 1:  # Wilson's of an accuracy
        low, high = one.low, one.high
    return SweepNumber(
        label,
        one.setting.label,
        one.quantity,
        float(samples[:, 0].mean()),
        low,
        high,
        _difference(numbers, {seed: card.numbers[key] for seed, card in first.items()}),
        len(numbers),
        one.images,
    )


def _samples(numbers: Mapping[int, Number]) -> Float[np.ndarray, "seeds draws"]:
    return np.stack([numbers[seed].samples for seed in sorted(numbers)])


def _limits(samples: Float[np.ndarray, "seeds draws"]) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds; the first column is the value itself."""
    seeds, draws = samples.shape[0], samples.shape[1] - 1
    taken = np.random.default_rng(0).integers(0, seeds, (seeds, draws))
    low, high = interval(np.take_along_axis(samples[:, 1:], taken, axis=0).mean(0))
    return float(low), float(high)


def _difference(own: Mapping[int, Number], first: Mapping[int, Number]) -> Limits | None:
    """Own minus first over the seeds that both have, with its interval."""
    both = [seed for seed in own if seed in first]
    if not both or len({number.images for number in (*own.values(), *first.values())}) > 1:
        return None
    gap = _samples({seed: own[seed] for seed in both}) - _samples({seed: first[seed] for seed in both})
    return float(gap[:, 0].mean()), *_limits(gap)
