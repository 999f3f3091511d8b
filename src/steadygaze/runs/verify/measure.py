"""The rows of a batch, as they become known: maps of every column, measured by every metric.

Methods that share passes are explained together (a part). Their maps are then measured a few at a time, so
that rows are on the disk soon after their map is made; metrics that compare maps or run the methods again
follow when all parts are done. What is measured together depends on the plan and the device only, never on
what was done before: the rows of a resumed batch are those of an undisturbed one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import CachedForward
from steadygaze.faithfulness.metric import METRICS, Batch, Values
from steadygaze.maps import MapName, MapWriter, StoredMethod
from steadygaze.runs.loop import Lacks, Portion
from steadygaze.runs.maps import BROKEN, MethodMaps, flags_of, maps_of
from steadygaze.runs.rows import Row, RowKey, json_number
from steadygaze.runs.verify.plan import MapPart, Plan
from steadygaze.target import task_of_outputs
from steadygaze.vit import adapt
from steadygaze.vit.clean_forward import CleanForward

AT_ONCE = {"cpu": 1}  # maps that are measured together: more would not run faster
AT_ONCE_ELSEWHERE = 8
TargetOf = Callable[[Batch, CachedForward], Tensor]  # the class that is explained for each image, (B,)
Maps = dict[int, MethodMaps]  # by number in the plan


def compute_rows(
    forward: CachedForward,
    batch: Batch,
    plan: Plan,
    target: Tensor,
    identity: dict[str, Any],
    lacks: Lacks = lambda images, keys: True,
    keep: MapWriter | None = None,
) -> Iterator[Portion]:
    """The rows of a batch that are missing, in portions that become known together.

    lacks: which rows are missing; the others are not computed
    keep: stores the maps, before their rows are returned
    """
    return _BatchRows(forward, batch, plan, target, identity, lacks, keep).portions()


@dataclass(frozen=True)
class _BatchRows:
    """Computes the rows of one batch; all maps and metrics share `forward`."""

    forward: CachedForward
    batch: Batch
    plan: Plan
    target: Tensor
    identity: dict[str, Any]
    lacks: Lacks
    keep: MapWriter | None

    def portions(self) -> Iterator[Portion]:
        """See `compute_rows`."""
        plan, maps = self.plan, Maps()
        joint = self._missing(range(len(plan.maps)), plan.joint_metrics)
        for part in plan.parts(len(self.forward.vit.blocks)):
            groups = self._groups(part.numbers)
            missing = [self._missing(group, plan.single_metrics) for group in groups]
            work = len(self.batch.names)
            if not any(missing) and not joint:
                yield Portion([], work * len(part.numbers), known=True)
                continue
            made = part_maps(self.forward, self.target, part, self.batch.names)
            maps |= made
            if self.keep is not None and not part.stored:
                keep_maps(self.keep, self.batch, made, self.target, plan)
            for group, wanted in zip(groups, missing, strict=True):
                chosen = {number: made[number] for number in group}
                rows = self._rows(chosen, plan.single_metrics) if wanted else []
                yield Portion(rows, work * len(group), known=not wanted and bool(plan.single_metrics))
        if joint:
            yield Portion(self._rows(dict(sorted(maps.items())), plan.joint_metrics))

    def _groups(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Maps that are measured together."""
        size = AT_ONCE.get(self.forward.images.device.type, AT_ONCE_ELSEWHERE)
        return [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]

    def _missing(self, numbers: Sequence[int], metrics: Sequence[str]) -> bool:
        keys = self._keys(tuple(numbers), tuple(metrics))
        return bool(keys) and self.lacks(self.batch.names, keys)

    def _keys(self, numbers: Sequence[int], metrics: Sequence[str]) -> tuple[RowKey, ...]:
        wanted = set(numbers)
        columns = zip(self.plan.columns, self.plan.source, strict=True)
        return tuple(column.key(name) for column, source in columns if source in wanted for name in metrics)

    def _rows(self, maps: Maps, metrics: Sequence[str]) -> list[Row]:
        """The rows of these maps, by image, column and metric."""
        vit, plan = self.forward.vit, self.plan

        def explain_again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            clean = CleanForward.of(adapt(model, task_of_outputs(vit.plan.outputs)), images)
            return _stacked([one.maps for one in plan_maps(clean, classes, plan, self.batch.names)])

        evaluation = evaluate(
            vit,
            self.batch,
            _stacked([one.maps for one in maps.values()]),
            metrics,
            target=self.target,
            seed=plan.seed,
            ratios=plan.ratios,
            fill=plan.fill,
            explain=explain_again,
            forward=self.forward,
            unattributed=_stacked([one.unattributed for one in maps.values()]),
            explained=_stacked([one.explained for one in maps.values()]),
        )
        numbers = {name: _Numbers(name, values, plan) for name, values in evaluation.values.items()}
        position = {number: index for index, number in enumerate(maps)}
        rows = []
        for b, image in enumerate(self.batch.names):
            for column, source in zip(plan.columns, plan.source, strict=True):
                if source not in maps:
                    continue
                flag = maps[source].flags.get(b)
                broken = flag == BROKEN
                for name in metrics:
                    row: Row = {
                        **self.identity,
                        "method": column.method.name,
                        "score": column.score,
                        "metric": name,
                        "image": image,
                    }
                    index = position[source]
                    row["value"] = None if broken else numbers[name].value(index, b)
                    optional = {
                        "detail": None if broken else numbers[name].detail(index, b),
                        "note": evaluation.notes.get(name),
                        "flag": flag,
                    }
                    row |= {key: value for key, value in optional.items() if value}
                    row["seed"] = plan.seed
                    rows.append(row)
        return rows


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


def part_maps(clean: CleanForward, target: Tensor, part: MapPart, names: Sequence[str]) -> Maps:
    """The maps of methods that share passes, and which of them are zero or broken (those are zero here).

    names: keys of the images, for maps that are read
    """
    if not part.stored:
        methods = [m for m in part.methods if not isinstance(m, StoredMethod)]
        made = maps_of(clean, target, methods, part.score)
        return dict(zip(part.numbers, made, strict=True))
    height, width = clean.images.shape[-2:]
    logit = clean.logits.gather(1, target[:, None])[:, 0]  # what they explain is not stored
    read: Maps = {}
    for number, method in zip(part.numbers, part.methods, strict=True):
        assert isinstance(method, StoredMethod)
        maps, broken = method.batch(names, target.tolist(), clean.grid, (height, width))
        maps = maps.to(clean.images.device)
        read[number] = MethodMaps(maps, flags_of(maps, broken), torch.zeros_like(logit), logit)
    return read


def plan_maps(clean: CleanForward, target: Tensor, plan: Plan, names: Sequence[str]) -> list[MethodMaps]:
    """The maps of the whole plan, those that are computed first, then those that are read.

    names: keys of the images, for maps that are read
    """
    maps: Maps = {}
    for part in plan.parts(len(clean.vit.blocks)):
        maps |= part_maps(clean, target, part, names)
    return [maps[number] for number in sorted(maps)]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, in the widest of their precisions."""
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return torch.stack([tensor.to(widest) for tensor in tensors])


def keep_maps(writer: MapWriter, batch: Batch, maps: Maps, target: Tensor, plan: Plan) -> None:
    """Store maps of a batch that were computed, not read."""
    names = {number: MapName(plan.maps[number].method.name, plan.maps[number].score) for number in maps}
    broken = {
        names[number]: [b for b, flag in one.flags.items() if flag == BROKEN] for number, one in maps.items()
    }
    writer.write(
        batch.names,
        {names[number]: one.maps for number, one in maps.items()},
        target.tolist(),
        {name: positions for name, positions in broken.items() if positions},
    )
