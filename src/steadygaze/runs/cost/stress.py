"""The cost of a `stress` run: making images under every condition, and running the model on each kind of
condition.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from steadygaze.errors import InputError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.cost.counting import PassCounter
from steadygaze.runs.cost.estimate import (
    SHARDS,
    Estimate,
    Left,
    Part,
    Speed,
    Work,
    note_of_shard,
    sample_jobs,
    what_is_left,
)
from steadygaze.runs.cost.timing import Cost, Meter, held, mean_seconds
from steadygaze.runs.loop import Run
from steadygaze.runs.rows import STRESS, RowKey
from steadygaze.runs.samples import MOST
from steadygaze.runs.settings import Condition
from steadygaze.runs.shards import World
from steadygaze.runs.source import Batch, ImageView, MemoryData, StreamData, StressJob
from steadygaze.runs.store import row_line
from steadygaze.runs.stress import PreparedStress, StressRequest, prepare_stress

ALLOWED = 60.0  # seconds for all kinds of conditions together, about
REFERENCES = 64  # images of a bank that are shown to a suite before it is timed


def estimate_stress(
    request: StressRequest,
    *,
    shards: Sequence[int] = SHARDS,
    world: World | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Estimate:
    """What `stress` will cost with this request. Checks all that the run checks, and writes nothing."""
    began = time.perf_counter()
    if request.in_memory:
        raise InputError("dry run: expected data in a folder, whose images can be counted, got batches")
    world = (world or World()).of_shard(request.shard)
    prepared = prepare_stress(request, world)
    assert not isinstance(prepared.data, MemoryData)
    run = Run(request.out, prepared.settings, prepared.about, task=STRESS, world=world)
    left = what_is_left(run, prepared.jobs(), prepared.loader)
    startup = time.perf_counter() - began
    pieces = _Pieces(prepared, left, on_progress)
    pieces.measure()
    work = Work(Speed(prepared.num_workers, prepared.evaluator.device), startup)
    for batch, decoding in pieces.decoding_by_batch().items():
        work.add(batch, 0.0, decoding)
    model: dict[str, list[float]] = {}
    for job in left.jobs:
        cost, images = pieces.cost(job), len(job.images)
        loading = images * pieces.making[_condition(job)]
        if job.keys:
            work.add(job.batch, images * cost.seconds, loading)
        else:
            work.every = work.every[0] + images * cost.seconds, work.every[1] + loading
        sums = model.setdefault(f"model: {_condition(job).suite}", [0.0, 0.0])
        sums[0] += cost.passes_a_batch + images * cost.passes
        sums[1] += images * cost.seconds
    parts = [Part(name, passes, seconds) for name, (passes, seconds) in model.items()]
    if pieces.samples is not None and request.shard.index == 0:
        parts.append(pieces.samples)
        work.add(0, pieces.samples.seconds, 0.0)
    loading = work.every[1] + sum(seconds for _, seconds in work.batches.values())
    if parts:
        parts.append(Part("loading and making images", 0.0, loading))
    return Estimate(
        STRESS,
        prepared.evaluator.name,
        str(prepared.evaluator.device),
        left.images,
        left.images_left,
        left.rows,
        left.rows_left,
        sum(part.passes for part in parts),
        work.seconds(),
        startup,
        sum(count * pieces.row_bytes(key) for key, count in left.missing.items()),
        held(prepared.evaluator.device) + pieces.memory,
        {} if request.shard else work.by_shards(shards),
        parts,
        [*prepared.notes, *note_of_shard(request.shard)],
    )


def _condition(job: StressJob) -> Condition:
    assert job.condition is not None
    return job.condition


def _kind(job: StressJob) -> Hashable:
    """Conditions of one kind cost the model the same; levels, such as severities, make no difference."""
    condition = _condition(job)
    names = tuple(setting.name for setting in condition.settings)
    metrics = tuple(metric.name for metric in condition.metrics)
    return condition.suite, names, metrics, condition.views, condition.unchanged, bool(job.keys)


class _Pieces:
    """Conditions of a run, measured on a few images of two of their jobs.

    making: seconds that a worker needs for the views of one image, without reading the image
    samples: the images that the report shows; None if they are stored
    """

    def __init__(self, prepared: PreparedStress, left: Left, on_progress: OnProgress) -> None:
        self.prepared, self.left, self.on_progress = prepared, left, on_progress
        self.making: dict[Condition, float] = {}
        self.reading = 0.0
        self.memory = 0.0
        self.samples: Part | None = None
        self._costs: dict[Hashable, Cost] = {}
        self._row_bytes: dict[RowKey, float] = {}

    def cost(self, job: StressJob) -> Cost:
        """The model's part of a job."""
        return self._costs[_kind(job)]

    def row_bytes(self, key: RowKey) -> float:
        """Bytes of a row."""
        return self._row_bytes[key]

    def measure(self) -> None:
        """Measure one of each condition, and the model on one of each kind."""
        conditions: dict[Condition, list[StressJob]] = {}
        kinds: dict[Hashable, list[StressJob]] = {}
        for job in self.left.jobs:
            conditions.setdefault(_condition(job), []).append(job)
            kinds.setdefault(_kind(job), []).append(job)
        if not kinds:
            return
        evaluator = self.prepared.evaluator
        counter = PassCounter(evaluator.model, evaluator.vit, evaluator.preprocess.size)
        meter = Meter(counter, evaluator.device, ALLOWED / len(kinds))
        self._show_references()
        total = len(conditions) + len(kinds)
        for number, (condition, jobs) in enumerate(conditions.items()):
            self._report(number, total, f"making {condition.setting.label}" if condition.settings else "")
            self._make(condition, jobs)
        self.reading = self._read()
        for number, jobs in enumerate(kinds.values()):
            label = _condition(jobs[0]).settings
            self._report(len(conditions) + number, total, f"model, {label[0].label}" if label else "")
            self._run(meter, jobs)
        out = self.prepared.request.out
        if out is not None and not self.prepared.sampler(out).stored:
            self.samples = self._samples(meter)
        self._report(total, total, "")

    def _report(self, done: int, total: int, detail: str) -> None:
        self.on_progress(Progress("dry run", done, total, "pieces", detail=detail))

    def _show_references(self) -> None:
        """Let suites see some of the references that their measurements need."""
        shown = 0
        for job in self.left.jobs:
            if job.keys or shown >= REFERENCES:
                continue
            made = self.prepared.loader.load(job).data
            if made is not None:
                self.prepared.compute(job, made)
                shown += len(made.images)

    def _make(self, condition: Condition, jobs: list[StressJob]) -> None:
        """Make two images; reading them is timed apart, since a worker keeps them for the next condition."""
        images = [jobs[0].run_images[0], jobs[len(jobs) // 2].run_images[-1]]
        loader = self.prepared.loader
        small = [replace(jobs[0], images=(image.name,), run_images=(image,)) for image in images]
        loader.load(small[1])
        self.making[condition] = mean_seconds([partial(loader.load, job) for job in small])

    def _read(self) -> float:
        """Seconds to read and resize an image that no worker has yet."""
        loader = self.prepared.loader
        images = [job.run_images[0] for job in (self.left.jobs[0], self.left.jobs[-1])]

        def read(view: ImageView) -> None:
            loader.preprocess.pixels(view.opened())

        return mean_seconds([partial(read, ImageView(image, loader)) for image in images])

    def decoding_by_batch(self) -> dict[int, float]:
        """Seconds to read the images of each batch; every worker reads those that it needs for itself."""
        jobs: dict[int, list[StressJob]] = {}
        for job in self.left.jobs:
            if job.keys:
                jobs.setdefault(job.batch, []).append(job)
        readers = max(1, self.prepared.num_workers)
        return {
            batch: min(len(some), readers) * self.reading * len({name for job in some for name in job.images})
            for batch, some in jobs.items()
        }

    def _run(self, meter: Meter, jobs: list[StressJob]) -> None:
        """The model on up to two jobs of one kind, and the rows that come of it."""
        samples = sample_jobs(jobs, self.prepared.loader.load)
        pairs = [(job, inputs.data) for job, inputs in samples if inputs.data is not None]

        def inputs(number: int, images: int) -> tuple[StressJob, Batch]:
            job, one = pairs[number % len(pairs)]
            return job, first_images(one, images)

        def run(pair: tuple[StressJob, Batch]) -> None:
            list(self.prepared.compute(*pair))

        cost = meter.cost(inputs, run, min(len(one.images) for _, one in pairs))
        self.memory = max(self.memory, cost.memory)
        self._costs[_kind(jobs[0])] = cost
        self._measure_rows(*pairs[0], jobs)

    def _samples(self, meter: Meter) -> Part | None:
        """One image under all conditions, and maps of two of those that the report shows."""
        ready = self.prepared
        stream = isinstance(ready.data, StreamData)  # it has been read, and keeps its first images
        images = ready.sample_images(() if stream else next(ready.groups()))[:MOST]
        with tempfile.TemporaryDirectory() as name:
            sampler = ready.sampler(Path(name))
            shown = sampler.first_readable(images)
            if shown is None:
                return None
            sampler.images([shown])  # caches of the libraries
            conditions = meter.sample(partial(sampler.conditions, shown))
            maps = meter.sample(partial(sampler.images, [shown] * 2))
        each = len(images) / 2
        return Part(
            "samples of the report",
            conditions.passes + each * maps.passes,
            conditions.seconds + each * maps.seconds,
        )

    def _measure_rows(self, job: StressJob, made: Batch, jobs: list[StressJob]) -> None:
        if not job.keys:
            return
        sizes: dict[tuple[str, str], float] = {}
        content = self.prepared.loader.content_of(made.images[0])
        for row in self.prepared.compute(job, first_images(made, 1)):
            size = float(len(row_line({**row, "content": content})))
            size += self.left.name_length - len(row["image"].encode()) - len(row["setting"].encode())
            sizes[row["setting"], row["metric"]] = size
        measured = [setting.label for setting in _condition(job).settings]
        for condition in {_condition(other) for other in jobs}:
            for setting, own in zip(condition.settings, measured, strict=True):
                for metric in condition.metrics:
                    key = setting.label, "", metric.name
                    self._row_bytes[key] = sizes[own, metric.name] + len(setting.label.encode())


def first_images(made: Batch, images: int) -> Batch:
    """The first of the images that a worker made."""
    maps = None if made.label_maps is None else made.label_maps[:images]
    return Batch(made.images[:images], made.views[:images], maps)
