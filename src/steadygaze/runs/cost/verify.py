"""The cost of a `verify` run: maps of methods that share passes, each search, all metrics, loading, rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import Batch, CachedForward
from steadygaze.faithfulness.metric import METRICS
from steadygaze.methods.registry import Method, parse_method
from steadygaze.methods.search import report_searches
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.cost.counting import PassCounter
from steadygaze.runs.cost.declared import forward_passes
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
from steadygaze.runs.plan import Column
from steadygaze.runs.rows import Row
from steadygaze.runs.shards import World
from steadygaze.runs.store import row_line
from steadygaze.runs.verify import PreparedVerify, VerifyRequest, compute_rows, plan_maps, prepare_verify
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import packable

MAPS = 4  # maps that metrics are timed with; the cost of more maps is in proportion


def estimate_verify(
    request: VerifyRequest,
    *,
    shards: Sequence[int] = SHARDS,
    world: World | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Estimate:
    """What `verify` will cost with this request. Checks all that the run checks, and writes nothing."""
    began = time.perf_counter()
    if request.in_memory:
        raise InputError("dry run: expected data in a folder, whose images can be counted, got batches")
    world = (world or World()).of_shard(request.shard)
    prepared = prepare_verify(request, world)
    run = Run(request.out, prepared.settings, prepared.about, task="verify", world=world)
    jobs = list(chain.from_iterable(prepared.source.jobs(prepared.plan.keys)))
    left = what_is_left(run, jobs, prepared.source)
    startup = time.perf_counter() - began
    costs, loading, row_bytes = {}, 0.0, 0.0
    work = Work(Speed(request.num_workers or 0, prepared.device), startup)
    if left.jobs:
        pieces = _Pieces(prepared, left, on_progress)
        costs, loading, row_bytes = pieces.costs(), pieces.loading, pieces.bytes()
    total = sum(costs.values(), Cost())
    for job in left.jobs:
        images = len(job.images)
        work.add(job.batch, images * total.seconds, images * loading)
    count = sum(len(job.images) for job in left.jobs)
    parts = [
        Part(name, len(left.jobs) * cost.passes_a_batch + count * cost.passes, count * cost.seconds)
        for name, cost in costs.items()
    ]
    if parts:
        parts.append(Part("loading images", 0.0, count * loading))
    return Estimate(
        "verify",
        prepared.identity["model"],
        str(prepared.device),
        left.images,
        left.images_left,
        left.rows,
        left.rows_left,
        sum(part.passes for part in parts),
        work.seconds(),
        startup,
        row_bytes,
        held(prepared.device) + total.memory,
        {} if request.shard else work.by_shards(shards),
        parts,
        note_of_shard(request.shard),
    )


class _Enough(Exception):
    """A search that was stopped because its share is known."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share


class Given(NamedTuple):
    """Images, the model's run on them, and the classes that are explained."""

    batch: Batch
    forward: CachedForward
    target: Tensor


class _Pieces:
    """The pieces of a run, measured on two of its batches."""

    def __init__(self, prepared: PreparedVerify, left: Left, on_progress: OnProgress) -> None:
        self.prepared, self.left, self.on_progress = prepared, left, on_progress
        self.plan, self.vit = prepared.plan, prepared.vit
        samples = sample_jobs(left.jobs, prepared.source.load)
        self.contents = dict(chain.from_iterable(inputs.content.items() for _, inputs in samples))
        self.batches = [inputs.data.to(prepared.device) for _, inputs in samples if inputs.data is not None]
        self.batch_size = min(len(batch.labels) for batch in self.batches)
        calls = [partial(prepared.source.load, job) for job, _ in samples]
        self.loading = mean_seconds(calls) * len(calls) / sum(len(job.images) for job, _ in samples)
        size = self.batches[0].images.shape
        counter = PassCounter(self.vit.model, self.vit, (size[-2], size[-1]))
        self.meter = Meter(counter, prepared.device)
        with torch.no_grad(), evaluation_mode(self.vit.model):  # tried once for a model, by the first caller
            packable(self.vit, self.vit.embed(self.batches[0].images[:1]))

    def inputs(self, number: int, images: int) -> Given:
        """The first images of a sample batch, run through the model, and the classes that are explained."""
        batch = first_images(self.batches[number % len(self.batches)], images)
        forward = CachedForward.of(self.vit, batch.images)
        _ = forward.logits
        return Given(batch, forward, self.prepared.target_of(batch, forward))

    def costs(self) -> dict[str, Cost]:
        """The cost of each piece, by name."""
        searches = {method.name for method in self.plan.searches}
        shared = tuple(column for column in self.plan.maps if column.method.name not in searches)
        layered = any(method.base.kind != "model" for method, _ in self.plan.computed)
        steps: list[tuple[str, Callable[[], Cost]]] = [("images as they are", self._clean)]
        if shared:
            steps.append(("maps", partial(self._maps, shared)))
        for column in self.plan.maps:
            if isinstance(column.method, Method) and column.method.name in searches:
                steps.append((f"search: {column.method.name}", partial(self._search, column)))
        costs: dict[str, Cost] = {}
        for number, (name, measure) in enumerate(steps):
            self._report(number, len(steps) + 1, name)
            costs[name] = costs.get(name, Cost()) + measure()
        self._report(len(steps), len(steps) + 1, "metrics")
        clean = costs.pop("images as they are")
        explain = sum(costs.values(), Cost() if layered else clean)
        costs["metrics"] = self._metrics(explain)
        predicted = self.prepared.settings["target"] == "predicted"
        if predicted or not layered or any(METRICS[name].uses_model for name in self.plan.metrics):
            costs = {"images as they are": clean, **costs}
        self._report(len(steps) + 1, len(steps) + 1, "")
        return costs

    def _report(self, done: int, total: int, detail: str) -> None:
        self.on_progress(Progress("dry run", done, total, "pieces", detail=detail))

    def _clean(self) -> Cost:
        """One forward pass on the whole image, which methods and metrics share."""

        def inputs(number: int, images: int) -> Tensor:
            return first_images(self.batches[number % len(self.batches)], images).images

        return self.meter.cost(inputs, lambda x: CachedForward.of(self.vit, x).logits, self.batch_size)

    def _maps(self, columns: tuple[Column, ...]) -> Cost:
        plan = replace(self.plan, columns=columns)

        def run(given: Given) -> None:
            plan_maps(given.forward, given.target, plan, given.batch.names)

        return self.meter.cost(self.inputs, run, self.batch_size)

    def _search(self, column: Column) -> Cost:
        """One image; stopped when it takes too long, since all runs of a search cost the same."""
        assert isinstance(column.method, Method)
        plan, declared = replace(self.plan, columns=(column,)), forward_passes(column.method)
        given = self.inputs(0, 1)
        share = 1.0

        def listen(progress: Progress) -> None:
            counted = progress.total is not None and progress.total >= declared / 2
            if counted and progress.fraction and time.perf_counter() - began > self.meter.allowed:
                raise _Enough(progress.fraction)

        def call() -> None:
            nonlocal share
            try:
                with report_searches(listen), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the run itself will warn
                    plan_maps(given.forward, given.target, plan, given.batch.names)
            except _Enough as stopped:
                share = stopped.share

        began = time.perf_counter()
        sample = self.meter.sample(call)
        return Cost(0.0, sample.passes / share, sample.seconds / share, sample.memory)

    def _metrics(self, explain: Cost) -> Cost:
        """All metrics, of a few random maps; `explain`: the cost of all maps, for metrics that make them
        again.
        """
        maps = min(MAPS, len(self.plan.maps))
        calls = 0

        def run(given: Given, count: int = maps) -> None:
            nonlocal calls
            shape = count, len(given.target), *given.forward.grid
            some = torch.rand(shape, device=given.batch.images.device)

            def again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return some.flip(1)

            calls = 0
            evaluate(
                self.vit,
                given.batch,
                some,
                self.plan.metrics,
                target=given.target,
                seed=self.plan.seed,
                ratios=self.plan.ratios,
                fill=self.plan.fill,
                explain=again,
                forward=given.forward,
            )

        cost = self.meter.cost(self.inputs, run, self.batch_size)
        if maps < len(self.plan.maps):
            given = self.inputs(0, 1)
            single = self.meter.sample(lambda: run(given, 1)).passes
            a_map = (cost.passes_a_batch + cost.passes - single) / (maps - 1)
            passes = cost.passes + (len(self.plan.maps) - maps) * a_map
            factor = passes / cost.passes if cost.passes else len(self.plan.maps) / maps
            cost = replace(cost, passes=passes, seconds=cost.seconds * factor)
        return cost + explain.times(calls)

    def bytes(self) -> float:
        """Bytes of the rows that are missing, from rows of a random map of one image, and of kept maps."""
        given = self.inputs(0, 1)
        column = Column(parse_method("random"), self.plan.columns[0].score)
        plan, name = replace(self.plan, columns=(column,)), given.batch.names[0]
        sizes: dict[str, float] = {}
        portions = compute_rows(given.forward, given.batch, plan, given.target, self.prepared.identity)
        for row in (row for portion in portions for row in portion.rows):
            length = self._length({**row, "content": self.contents.get(name, "")}) - len(name.encode())
            sizes[row["metric"]] = length + self.left.name_length
        rows = sum(
            count * (sizes[metric] + _length(method, score) - _length(column.method.name, column.score))
            for (method, score, metric), count in self.left.missing.items()
        )
        patches = given.forward.grid[0] * given.forward.grid[1]
        kept = 0 if self.prepared.request.keep_maps is None else len(self.plan.computed)
        return rows + self.left.images_left * kept * patches * HALF

    def _length(self, row: Row) -> float:
        """Bytes of a row, with numbers of full length where those of random maps are short."""
        metric, detail = METRICS[row["metric"]], row.get("detail") or []
        if metric.needs_explain or metric.detail_by_method:
            count = len(self.plan.columns) if metric.detail_by_method else len(detail)
            row = {**row, "value": FULL_NUMBER, **({"detail": [FULL_NUMBER] * count} if detail else {})}
        return float(len(row_line(row)))


HALF = 2  # bytes of a number of a stored map
FULL_NUMBER = -1 / 3  # a correlation, in as many bytes as most numbers take


def _length(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


def first_images(batch: Batch, images: int) -> Batch:
    """The first images of a batch."""
    return replace(
        batch,
        images=batch.images[:images],
        labels=batch.labels[:images],
        masks=None if batch.masks is None else batch.masks[:images],
        names=batch.names[:images],
    )
