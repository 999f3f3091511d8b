"""The rows of a batch: attribution maps of every column, measured by every metric."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import CachedForward
from steadygaze.faithfulness.metric import METRICS, Batch, Values
from steadygaze.maps import MapName, MapWriter
from steadygaze.runs.maps import BROKEN, MethodMaps, flags_of, maps_of
from steadygaze.runs.rows import Row, json_number
from steadygaze.runs.verify.plan import Plan
from steadygaze.target import task_of_outputs
from steadygaze.vit import adapt
from steadygaze.vit.clean_forward import CleanForward

Flags = dict[tuple[int, int], str]  # (map, image) -> zero or broken
TargetOf = Callable[[Batch, CachedForward], Tensor]  # the class that is explained for each image, (B,)


def compute_rows(
    forward: CachedForward,
    batch: Batch,
    plan: Plan,
    target: Tensor,
    identity: dict[str, Any],
    keep: MapWriter | None = None,
) -> Iterator[Row]:
    """Every row of a batch, by image, column and metric; all maps and metrics share `forward`.

    keep: stores the maps, before their rows are returned
    """
    vit = forward.vit
    made = plan_maps(forward, target, plan, batch.names)
    maps, flags = _stacked([one.maps for one in made]), _flags(made)
    if keep is not None:
        keep_maps(keep, batch, maps, flags, target, plan)

    def explain_again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        view = adapt(model, task_of_outputs(vit.plan.outputs))
        again = plan_maps(CleanForward.of(view, images), classes, plan, batch.names)
        return _stacked([one.maps for one in again])

    evaluation = evaluate(
        vit,
        batch,
        maps,
        plan.metrics,
        target=target,
        seed=plan.seed,
        ratios=plan.ratios,
        fill=plan.fill,
        explain=explain_again,
        forward=forward,
        unattributed=_stacked([one.unattributed for one in made]),
        explained=_stacked([one.explained for one in made]),
    )
    numbers = {name: _Numbers(name, values, plan) for name, values in evaluation.values.items()}
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
                broken = flag == BROKEN
                row["value"] = None if broken else numbers[name].value(source, b)
                optional = {
                    "detail": None if broken else numbers[name].detail(source, b),
                    "note": evaluation.notes.get(name),
                    "flag": flag,
                }
                row |= {key: value for key, value in optional.items() if value}
                row["seed"] = plan.seed
                yield row


class _Numbers:
    """The values of a metric as JSON numbers, by map and image."""

    def __init__(self, name: str, values: Values, plan: Plan) -> None:
        self._values = values.value.detach().cpu().numpy()
        self._details: np.ndarray | None = None
        if values.detail is not None:
            self._details = values.detail.detach().cpu().numpy()
            if METRICS[name].detail_by_method:  # a row has one number for each column, not for each map
                self._details = self._details[..., list(plan.source)]

    def value(self, m: int, b: int) -> float | None:
        return json_number(self._values[m, b])

    def detail(self, m: int, b: int) -> list[float | None] | None:
        return None if self._details is None else [json_number(x) for x in self._details[m, b]]


def plan_maps(clean: CleanForward, target: Tensor, plan: Plan, names: Sequence[str]) -> list[MethodMaps]:
    """The maps of the plan, those that are computed first, then those that are read.

    names: keys of the images, for maps that are read
    """
    found: list[MethodMaps] = []
    for score, methods in plan.calls:
        found += maps_of(clean, target, methods, score)
    height, width = clean.images.shape[-2:]
    for method in plan.stored:
        maps, broken = method.batch(names, target.tolist(), clean.grid, (height, width))
        logit = clean.logits.gather(1, target[:, None])[:, 0]  # what they explain is not stored
        maps = maps.to(clean.images.device)
        found.append(MethodMaps(maps, flags_of(maps, broken), torch.zeros_like(logit), logit))
    return found


def _flags(made: Sequence[MethodMaps]) -> Flags:
    return {(m, b): flag for m, one in enumerate(made) for b, flag in one.flags.items()}


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, in the widest of their precisions."""
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return torch.stack([tensor.to(widest) for tensor in tensors])


def keep_maps(
    writer: MapWriter, batch: Batch, maps: Tensor, flags: Flags, target: Tensor, plan: Plan
) -> None:
    """Store the maps of a batch that were computed, not read."""
    names = [MapName(method.name, score) for method, score in plan.computed]
    if not names:
        return
    broken = {
        name: [b for b in range(len(batch.names)) if flags.get((m, b)) == BROKEN]
        for m, name in enumerate(names)
    }
    writer.write(
        batch.names,
        dict(zip(names, maps, strict=False)),
        target.tolist(),
        {name: positions for name, positions in broken.items() if positions},
    )
