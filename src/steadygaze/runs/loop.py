"""Images x methods x metrics, batch by batch.

A batch's composition depends on the order of the data and the batch size alone, never on what was done before or on
how many processes work; batch b belongs to process b % world. So the rows of a run that was stopped, or split, are
those of one that was not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze.errors import BrokenMap, DegenerateMap
from steadygaze.explainer import explain
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.metric import Batch, Values
from steadygaze.method_registry import Method
from steadygaze.methods.search import listener, manner
from steadygaze.runs.plan import Plan
from steadygaze.runs.rows import Row
from steadygaze.runs.store import Done, key_of
from steadygaze.vit import ViT

ZERO, BROKEN = "zero map", "broken map"


@dataclass(frozen=True)
class World:
    """Which process this is, of how many, and how they wait for one another."""

    rank: int = 0
    size: int = 1
    local_main: bool = True
    device: torch.device | None = None
    wait: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


def world() -> World:
    """The processes that `accelerate launch` or `torchrun` started; this one alone otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
            warnings.warn(
                "accelerate launch --cpu starts one process however many are asked for (it leaves that to MPI). On CPUs "
                "use accelerate launch --multi_gpu --num_processes 2 -m steadygaze ..., or torchrun.",
                stacklevel=2,
            )
        return World()
    from accelerate import PartialState

    cpu = (
        os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        or not torch.cuda.is_available()
    )
    state = PartialState(
        cpu=cpu, timeout=timedelta(days=30)
    )  # a process may wait for a slower one at the end
    return World(
        state.process_index,
        state.num_processes,
        state.is_local_main_process,
        state.device,
        state.wait_for_everyone,
        state.destroy_process_group,
    )


@dataclass(frozen=True)
class Chunk:
    """The pictures of one batch.

    load: gives the batch (None if no picture is left), and why others could not be read
    again: whether one of these names, which could not be read before, can be read now
    """

    names: tuple[str, ...]
    load: Callable[[], tuple[Batch | None, dict[str, str]]]
    again: Callable[[Sequence[str]], bool] = lambda names: False


Target = Callable[[Batch], Tensor]  # the class that is explained, (B,)
Told = Callable[[int, int], None]  # pictures finished, of them computed now


def run(
    vit: ViT,
    chunks: Iterable[Chunk],
    plan: Plan,
    target: Target,
    identity: dict[str, Any],
    append: Callable[[list[Row]], None],
    done: Done,
    told: Told = lambda finished, computed: None,
    place: World | None = None,
    ahead: int = 0,
) -> None:
    """Compute what is missing of this process's batches; `append` is given each batch's new rows at once."""
    place = place or World()
    mine = (chunk for number, chunk in enumerate(chunks) if number % place.size == place.rank)
    for chunk, loaded in _loaded(_pending(mine, plan, done, told), ahead):
        batch, failed = loaded
        there = done.keys(chunk.names) if any(done.counts.get(name) for name in chunk.names) else set()
        rows: list[Row] = [
            {"image": image, "unreadable": why}
            for image, why in failed.items()
            if done.unreadable.get(image) != why
        ]
        if batch is not None:
            rows += [{"image": image, "unreadable": ""} for image in batch.names if image in done.unreadable]
            rows += [
                row for row in compute(vit, batch, plan, target(batch), identity) if key_of(row) not in there
            ]
        if rows:
            append(rows)
        told(len(chunk.names), len(chunk.names))


def _pending(chunks: Iterable[Chunk], plan: Plan, done: Done, told: Told) -> Iterator[Chunk]:
    for chunk in chunks:
        missing = done.missing(chunk.names, plan.rows_per_image)
        lost = [name for name in missing if name in done.unreadable]
        if len(missing) > len(lost) or (lost and chunk.again(lost)):
            yield chunk
        else:
            told(len(chunk.names), 0)


def _loaded(
    chunks: Iterator[Chunk], ahead: int
) -> Iterator[tuple[Chunk, tuple[Batch | None, dict[str, str]]]]:
    """Load chunks; one ahead of the computing if asked."""
    if not ahead:
        for chunk in chunks:
            yield chunk, chunk.load()
        return
    with ThreadPoolExecutor(1) as pool:
        waiting: list[tuple[Chunk, Any]] = []
        for chunk in chunks:
            waiting.append((chunk, pool.submit(chunk.load)))
            if len(waiting) > 1:
                first, future = waiting.pop(0)
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def compute(vit: ViT, batch: Batch, plan: Plan, target: Tensor, identity: dict[str, Any]) -> Iterator[Row]:
    """Every row of a batch, by image, column and metric."""
    maps, flags = explained(vit, batch.images, target, plan)

    def again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return explained(model, images, classes, plan)[0]

    found = evaluate(
        vit, batch, maps, plan.metrics, target=target, seed=plan.seed, ratios=plan.ratios, fill=plan.fill, explain=again
    )  # fmt: skip
    numbers = {name: _Numbers(values) for name, values in found.values.items()}
    alike = numbers.get("agreement")
    if alike and alike.detail is not None:
        alike.detail = alike.detail[
            ..., list(plan.source)
        ]  # from maps to columns: a row says how alike each column is
    for b, image in enumerate(batch.names):
        for column, source in zip(plan.columns, plan.source, strict=True):
            flag = flags.get((source, b))
            for name in plan.metrics:
                row: Row = {
                    **identity,
                    "method": column.method.name,
                    "score": column.score,
                    "metric": name,
                    "image": image,
                }
                row["value"], detail = (None, None) if flag == BROKEN else numbers[name].of(source, b)
                row |= {
                    k: v
                    for k, v in (("detail", detail), ("note", found.notes.get(name)), ("flag", flag))
                    if v
                }
                row["seed"] = plan.seed
                yield row


class _Numbers:
    """Values as numbers whose text is as short as their precision allows."""

    def __init__(self, values: Values) -> None:
        self.value = values.value.detach().cpu().numpy()
        self.detail = None if values.detail is None else values.detail.detach().cpu().numpy()

    def of(self, m: int, b: int) -> tuple[float | None, list[float | None] | None]:
        return short(self.value[m, b]), None if self.detail is None else [short(x) for x in self.detail[m, b]]


def short(x: Any) -> float | int | None:
    """As JSON: none where it is not finite, whole numbers as such."""
    if not np.isfinite(x):
        return None
    exact = float(str(x))  # the shortest text of a float32 is not that of the double of equal value
    return int(exact) if exact.is_integer() else exact


Flags = dict[tuple[int, int], str]


def explained(model: nn.Module | ViT, images: Tensor, target: Tensor, plan: Plan) -> tuple[Tensor, Flags]:
    """The maps of the plan, (M, B, gh, gw), and which of them are zero or broken (those are zero here)."""
    maps: list[Tensor] = []
    flags: Flags = {}
    for score, methods in plan.calls:
        for made, broken in maps_of(model, images, target, list(methods), score):
            flags |= {(len(maps), b): BROKEN for b in broken}
            empty = (made.flatten(1) == 0).all(1).nonzero()[:, 0].tolist()
            flags |= {(len(maps), b): ZERO for b in empty if b not in broken}
            maps.append(made)
    return torch.stack(maps), flags


def maps_of(
    model: nn.Module | ViT, images: Tensor, target: Tensor, methods: list[Method], score: str | None
) -> list[tuple[Tensor, list[int]]]:
    """One map (B, gh, gw) for each method, and the images where it is broken, which are zero. One broken map does not
    spoil others."""
    with (
        warnings.catch_warnings(),
        manner(listener(), partial=False),
    ):  # a stopped search must not become a row
        warnings.simplefilter("ignore", DegenerateMap)  # counted, and told at the end
        try:
            many = explain(model, images, target=target, method=list[str | Method](methods), score=score)
            return [(many[m.name].scores, []) for m in methods]
        except BrokenMap:
            if len(methods) > 1:
                return [maps_of(model, images, target, [m], score)[0] for m in methods]
        if len(images) > 1:
            parts = [
                maps_of(model, images[b : b + 1], target[b : b + 1], methods, score)[0]
                for b in range(len(images))
            ]
            return [
                (torch.cat([made for made, _ in parts]), [b for b, (_, broken) in enumerate(parts) if broken])
            ]
    return [(images.new_zeros(1, *_grid(model, images)), [0])]


def _grid(model: nn.Module | ViT, images: Tensor) -> tuple[int, int]:
    from steadygaze.vit import adapt

    vit = adapt(model) if isinstance(model, nn.Module) else model
    if not vit.plan.global_attention:
        return vit.grid
    with torch.no_grad():
        return vit.layout(vit.embed(images)).grid
