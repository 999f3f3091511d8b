"""The suite `ground_truth` of `verify`: methods on ViTs with hand-set weights, whose truth is known exactly.

Every task of `faithfulness.ground_truth` is a run of its own, with the class token and with mean pooling; the
rows of all are one result. `summary` makes its table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError
from steadygaze.faithfulness.ground_truth import NAMES, TASKS, Pool, hand_set_vit
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.request import DEFAULT_METRICS, VerifyRequest
from steadygaze.runs.rows import Rows, joined

if TYPE_CHECKING:
    import pandas as pd

IMAGES = 6  # of each task: every content of its images equally often
POOLS: dict[Pool, str] = {"token": "class token", "avg": "mean pooling"}
PREFIX = "ground_truth"


def load(task: str, pool: Pool = "token") -> LoadedModel:
    """A hand-set model as `verify` takes it."""
    model = hand_set_vit(task, pool)
    size = model.patch_embed.img_size  # type: ignore[union-attr]
    preprocess = Preprocess.resize_and_crop(tuple(size), mean=(0.5,) * 3, std=(0.5,) * 3)  # type: ignore[arg-type]
    name = f"{PREFIX}/{task}/{POOLS[pool]}"
    return LoadedModel(model, name, preprocess, ("no", "yes"), weights_hash(model), "timm")


def run_ground_truth(
    request: VerifyRequest,
    run: Callable[[VerifyRequest], Rows],
    on_progress: OnProgress = ignore_progress,
) -> Rows:
    """Run the suite: `run` executes the request of a task. With `request.out`, each task has a folder."""
    if request.shard:
        raise InputError(
            f"shard: expected none, got {request.shard}: the suite {request.suite} takes seconds"
        )
    runs = [(task, pool) for pool in POOLS for task in TASKS]
    metrics = NAMES if tuple(request.metrics) == DEFAULT_METRICS else request.metrics
    parts: list[Rows] = []
    for number, (task, pool) in enumerate(runs):
        on_progress(Progress(PREFIX, number, len(runs), "tasks"))
        count = request.limit or IMAGES
        images = TASKS[task].draw(count, torch.Generator().manual_seed(request.seed))
        one = replace(
            request,
            suite=None,
            model=load(task, pool),
            data=[(images, torch.ones(count, dtype=torch.long))],
            metrics=metrics,
            limit=None,
            out=None if request.out is None else request.out / f"{task}-{pool}",
        )
        parts.append(run(one))
    on_progress(Progress(PREFIX, len(runs), len(runs), "tasks"))
    return joined(parts)


def summary(rows: Rows, metric: str = NAMES[0]) -> pd.DataFrame:
    """Mean of a metric over the images: a line for each pooling and method, a column for each task and
    "mean"."""
    frame = rows.to_pandas()
    frame = frame[frame["metric"] == metric]
    frame[["task", "pool"]] = frame["model"].str.split("/", expand=True)[[1, 2]]
    table = frame.pivot_table("value", ["pool", "method"], "task", aggfunc="mean")
    table = table.reindex(columns=[task for task in TASKS if task in table])
    table["mean"] = table.mean(axis=1)
    return table
