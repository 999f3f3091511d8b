"""`--dry-run`: prepare a run exactly as the run itself does, time a few of its batches, and multiply.

Images and rows are counted from the jobs that are left, so they are exact. Seconds are extrapolated from two
batches of each condition (of a training: from two steps), after a warm-up. Nothing is written.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from steadygaze.errors import InputError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.jobs import Job
from steadygaze.runs.loop import Prepared, Run
from steadygaze.runs.request import StressRequest, VerifyRequest
from steadygaze.runs.shards import World
from steadygaze.runs.stress import prepare_stress
from steadygaze.runs.verify import prepare_verify
from steadygaze.training.images import TrainingImages, cache_features
from steadygaze.training.loop import TrainingRun, evaluate
from steadygaze.training.recipe import Recipe
from steadygaze.training.run_files import STATE, holds_run, load_state

SHARDS = (1, 8, 64)
ALLOWED = 30.0  # seconds of all timed batches, about; longer batches are timed with fewer images
REFERENCES = 64  # images of a reference set that a suite sees before its conditions are timed
TESTED = 64  # test images of a training that are timed, at most


@dataclass(frozen=True)
class Estimate:
    """The cost of a run; `images` and `rows` count the whole run, everything else what is left of it.

    Attributes:
        task: "verify", "stress" or "train".
        model: Name of the model.
        device: Device that the batches were timed on.
        images: Images of the run.
        images_left: Images that lack rows.
        rows: Rows of the run; of a training, lines of the log.
        rows_left: Rows that are missing.
        seconds: Seconds from the first row to the last, on this device.
        startup: Seconds before that, which each shard spends: loading the model, listing the images.
        shards: Number of shards -> seconds of the slowest one, startup included. Empty for `--shard I/N`.
        notes: What is left out or assumed.
    """

    task: str
    model: str
    device: str
    images: int
    images_left: int
    rows: int
    rows_left: int
    seconds: float
    startup: float
    shards: Mapping[int, float]
    notes: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return asdict(self)


def check_shards(numbers: Iterable[int]) -> tuple[int, ...]:
    """Sort numbers of shards; raises InputError unless all are 1 or more."""
    shards = tuple(sorted(set(numbers)))
    if not shards or shards[0] < 1:
        raise InputError(f"shards: expected whole numbers of 1 or more, such as 1,8,64, got {list(shards)}")
    return shards


# -- verify and stress -----------------------------------------------------------------------------


def estimate_run(
    request: VerifyRequest | StressRequest,
    *,
    shards: Sequence[int] = SHARDS,
    world: World | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Estimate:
    """Estimate a run of `verify` or `stress`. Checks everything that the run checks, and writes nothing.

    Args:
        request: The request of the run; its data must be files.
        shards: Numbers of shards to estimate the time for.
        world: Processes of the run.
        on_progress: Called after each timed piece.

    Returns:
        The estimate.

    Raises:
        InputError: The request is wrong, or its folder contains another run.
    """
    began = time.perf_counter()
    if request.in_memory:
        raise InputError("dry run: expected data in a folder, whose images can be counted, got batches")
    world = (world or World()).of_shard(request.shard)
    prepared: Prepared[Any]
    if isinstance(request, VerifyRequest):
        ready = prepare_verify(request, world)
        prepared = replace(ready, request=replace(request, keep_maps=None))  # a dry run stores no maps
    else:
        prepared = prepare_stress(request, world)
    run = Run(request.out, prepared.settings, prepared.about, task=prepared.task, world=world)
    notes = prepared.settings.get("notes", [])
    return _Sample(run, prepared).estimate(began, shards, notes, on_progress)


@dataclass(frozen=True)
class _Sample:
    """A prepared run, some of whose jobs are timed."""

    run: Run
    prepared: Prepared[Any]

    def estimate(
        self, began: float, shards: Sequence[int], notes: Sequence[str], on_progress: OnProgress
    ) -> Estimate:
        run, shard = self.run, self.run.world.shard
        all_jobs = self.prepared.jobs()
        own = [job for job in all_jobs if run.world.owns(job.batch)]
        run.read_done()
        left = run.remaining(all_jobs, self.prepared.loader)
        images_left, rows_left = set(), 0
        for job in left:
            for image, _ in run.missing(job):
                images_left.add(image)
                rows_left += 1
        startup = time.perf_counter() - began
        groups: dict[Any, list[Job]] = defaultdict(list)  # jobs whose images cost the same
        for job in left:
            groups[job.condition, job.set_name].append(job)
        by_batch: dict[int, float] = defaultdict(float)
        for_every_shard = 0.0
        for number, jobs in enumerate(groups.values()):
            on_progress(Progress("dry run", number, len(groups), "conditions"))
            trials = [self.prepared.trial(job) for job in jobs]
            _, times, note = trials[0]
            notes = [*notes, note] if note else notes
            seconds = self._seconds_of_image([trial for trial, _, _ in trials], ALLOWED / len(groups), times)
            for job in jobs:
                if job.keys:
                    by_batch[job.batch] += seconds * len(job.images)
                else:  # references: every shard needs all of them
                    for_every_shard += seconds * len(job.images)
        on_progress(Progress("dry run", len(groups), len(groups), "conditions"))

        def slowest(count: int) -> float:
            sums: dict[int, float] = defaultdict(float)
            for batch, seconds in by_batch.items():
                sums[batch % count] += seconds
            return for_every_shard + max(sums.values(), default=0.0)

        if shard:
            notes = [*notes, f"of shard {shard} only; leave out --shard to estimate the whole run"]
        return Estimate(
            run.task,
            self.prepared.identity["model"],
            str(self.prepared.device),
            len({image for job in own for image in job.images}),
            len(images_left),
            sum(len(job.images) * len(job.keys) for job in own),
            rows_left,
            slowest(1),
            startup,
            {} if shard else {count: startup + slowest(count) for count in shards},
            notes,
        )

    def _seconds_of_image(self, jobs: Sequence[Job], allowed: float, times: float = 1.0) -> float:
        """Time two of the largest batches, after a warm-up; computing them takes `times` as long."""
        full = max(len(job.images) for job in jobs)
        readable = (
            job
            for job in sorted(jobs, key=lambda job: full - len(job.images))
            if self.prepared.loader.load(job).data is not None
        )
        references = not jobs[0].keys
        batches = list(islice(readable, 1 + REFERENCES // full if references else 2))
        if not batches:
            raise InputError(
                f"dry run: none of the images that are left can be read, such as {jobs[0].images[0]}"
            )
        one_image = replace(batches[0], run_images=batches[0].run_images[:1])
        self._timed(one_image)
        slow = self._timed(one_image)
        if sum(slow) <= allowed or references:
            count = full if references else max(1, int(allowed / 2 / max(sum(slow), 1e-9)))
            batches = [replace(job, run_images=job.run_images[:count]) for job in batches]
            images = sum(len(job.images) for job in batches)
            loading, model = (sum(times) / images for times in zip(*map(self._timed, batches), strict=True))
        else:
            loading, model = slow
        return _together(loading, times * model, self.prepared.num_workers, self.prepared.device)

    def _timed(self, job: Job) -> tuple[float, float]:
        """Return the seconds of loading, and of computing."""
        began = time.perf_counter()
        data = self.prepared.loader.load(job).data
        loaded = time.perf_counter()
        if data is not None:
            list(self.prepared.compute(job, data, lambda images, keys: True))
        _synchronize(self.prepared.device)
        return loaded - began, time.perf_counter() - loaded


def _together(loading: float, model: float, num_workers: int, device: torch.device) -> float:
    """Return the seconds of loading and computing, which overlap if the model is on a GPU."""
    loading /= max(1, min(num_workers, os.cpu_count() or 1))
    return max(loading, model) if num_workers and device.type != "cpu" else loading + model


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# -- train -----------------------------------------------------------------------------------------


def estimate_train(
    recipe: Recipe,
    out: Path,
    *,
    device: str = "auto",
    shards: Sequence[int] = SHARDS,
    on_progress: OnProgress = ignore_progress,
    trust_remote_code: bool = False,
) -> Estimate:
    """Estimate a training. Prepares the run as `train` does, and writes nothing.

    Args:
        recipe: The recipe of the run.
        out: Output folder; if it contains a part of the run, the rest is estimated.
        device: "auto", "cpu", "cuda", ...
        shards: Numbers of processes of `accelerate launch`; their communication is not counted.
        on_progress: Called after each timed piece.
        trust_remote_code: Whether code of a model repository may run.

    Returns:
        The estimate.

    Raises:
        InputError: The recipe is wrong, or the folder contains another run.
    """
    began = time.perf_counter()
    run = TrainingRun(recipe, out, device, on_progress, trust_remote_code=trust_remote_code)
    startup = time.perf_counter() - began
    try:
        resumed = holds_run(out, recipe.settings) and (out / STATE).exists()
        first_step = int(load_state(out / STATE)["step"]) if resumed else 0
        steps = range(first_step + 1, run.total_steps + 1)
        seconds = (
            (_seconds_of_features(run) if run.head_name else _seconds_of_steps(run, steps)) if steps else 0.0
        )
        every = run.sampler.steps_per_epoch
        logged = [s for s in range(1, run.total_steps + 1) if not s % recipe.log_every or not s % every]
        return Estimate(
            "train",
            recipe.model.name,
            str(run.accelerator.device),
            len(run.images),
            len(run.images) if steps else 0,
            len(logged),
            sum(step > first_step for step in logged),
            seconds,
            startup,
            {count: startup + seconds / count for count in shards},
            run.notes,
        )
    finally:
        run.close()


def _seconds_of_steps(run: TrainingRun, steps: range) -> float:
    """Time two steps and a part of the test, after a warm-up; steps that take too long, with fewer images."""
    device, images_a_batch = run.accelerator.device, run.sampler.micro_batch_size
    few = min(2, images_a_batch)  # mixup needs pairs
    run.parallel_objective.train()

    def timed(step: int, count: int) -> tuple[float, float]:
        """Return the seconds of loading, and of the step."""
        began = time.perf_counter()
        keys = run.sampler.micro_batches(step)
        batches: list[Any] = [default_collate([run.images[key] for key in part[:count]]) for part in keys]
        loaded = time.perf_counter()
        run.train_step(batches)
        _synchronize(device)
        return loaded - began, time.perf_counter() - loaded

    timed(0, few)
    slow = sum(timed(0, few))
    count = min(images_a_batch, max(few, int(ALLOWED / 2 / slow * few) // 2 * 2))
    times = [timed(step, count) for step in (0, 1 % run.total_steps)]
    loading, model = (sum(part) / len(times) * images_a_batch / count for part in zip(*times, strict=True))
    seconds = len(steps) * _together(loading, model, run.recipe.data.workers, device)
    every, test_every = run.sampler.steps_per_epoch, run.recipe.test_every
    ends = [step for step in steps if step % every == 0]
    due = [s == run.total_steps or (test_every > 0 and s // every % test_every == 0) for s in ends]
    if run.test_images is None or not any(due):
        return seconds
    seed = (run.recipe.seed, 4, 0)

    def test(images: TrainingImages) -> None:
        evaluate(run.kept_model, run.objective, images, run.accelerator, max(1, images_a_batch), seed)

    return seconds + sum(due) * len(run.test_images) * _seconds_of_image(run, run.test_images, test)


def _seconds_of_features(run: TrainingRun) -> float:
    """Time the features of a linear probe, computed once for each image; its steps take next to no time."""
    head = run.trained_part(run.model)
    assert isinstance(head, nn.Linear)
    batch_size = max(1, run.sampler.micro_batch_size)
    count = len(run.images) + (0 if run.test_images is None else len(run.test_images))
    return count * _seconds_of_image(
        run,
        run.images,
        lambda images: cache_features(run.model, head, images, run.accelerator, batch_size=batch_size),
    )


def _seconds_of_image(run: TrainingRun, images: Any, call: Callable[[TrainingImages], object]) -> float:
    """Time a call on the first images, after a warm-up with one of them."""
    call(images.first(1))
    few = images.first(min(TESTED, len(images)))
    began = time.perf_counter()
    call(few)
    _synchronize(run.accelerator.device)
    return (time.perf_counter() - began) / len(few)
