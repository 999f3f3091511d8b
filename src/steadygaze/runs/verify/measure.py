"""The rows of a batch: attribution maps of every column, measured by every metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import CachedForward
from steadygaze.faithfulness.metric import METRICS, Batch, Values
from steadygaze.runs.maps import BROKEN, maps_of
from steadygaze.runs.rows import Row, json_number
from steadygaze.runs.verify.plan import Plan
from steadygaze.target import task_of_outputs
from steadygaze.vit import adapt
from steadygaze.vit.clean_forward import CleanForward

Flags = dict[tuple[int, int], str]  # (map, image) -> zero or broken
TargetOf = Callable[[Batch, CachedForward], Tensor]  # the class that is explained for each image, (B,)


def compute_rows(
    forward: CachedForward, batch: Batch, plan: Plan, target: Tensor, identity: dict[str, Any]
) -> Iterator[Row]:
    """Every row of a batch, by image, column and metric; all maps and metrics share `forward`."""
    vit = forward.vit
    maps, flags = plan_maps(forward, target, plan)

    def explain_again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        view = adapt(model, task_of_outputs(vit.plan.outputs))
        return plan_maps(CleanForward.of(view, images), classes, plan)[0]

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


def plan_maps(clean: CleanForward, target: Tensor, plan: Plan) -> tuple[Tensor, Flags]:
    """The maps of the plan, (M, B, gh, gw), and which of them are zero or broken (those are zero here)."""
    all_maps: list[Tensor] = []
    flags: Flags = {}
    for score, methods in plan.calls:
        for maps, flagged in maps_of(clean, target, methods, score):
            flags |= {(len(all_maps), b): flag for b, flag in flagged.items()}
            all_maps.append(maps)
    return torch.stack(all_maps), flags
