"""The suite `funnybirds` of `verify`: the protocol of FunnyBirds on a folder in its authors' layout.

The metrics are those of `faithfulness.funnybirds`. `summary` makes the table of the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

from steadygaze.data.datasets.funnybirds import FunnyBirds, read_funnybirds
from steadygaze.data.images import read_image
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.errors import InputError
from steadygaze.faithfulness.funnybirds import NAMES, SUITE, THRESHOLDS, PartTruth, best_threshold
from steadygaze.faithfulness.metric import METRICS
from steadygaze.runs.prepare import number_of_classes
from steadygaze.runs.request import DEFAULT_METRICS, VerifyRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import World
from steadygaze.vit.adapt import adapt

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class _Images(Dataset[tuple[Tensor, int]]):
    """Images with their labels, read one by one."""

    data: FunnyBirds
    preprocess: Preprocess
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.numbers[index]
        return self.preprocess(read_image(self.data.image_file(number))), self.data.labels[number]


def run_funnybirds(
    request: VerifyRequest,
    run: Callable[[VerifyRequest], Rows],
) -> Rows:
    """Run the suite: `run` executes a request."""
    if request.shard:
        raise InputError(f"shard: expected none, got {request.shard}: the suite {request.suite} has no parts")
    if request.in_memory or isinstance(request.place, StreamSpec):
        raise InputError("data: expected a folder in the layout of FunnyBirds", option="data")
    if request.target is not None:
        raise InputError(
            f"target: expected none, got {request.target!r}: the protocol explains the label, the predicted "
            "class and two others",
            option="target",
        )
    data = read_funnybirds(request.place)
    step = max(1.0, len(data.labels) / (request.limit or len(data.labels) or 1))
    numbers = tuple(int(k * step) for k in range(int(len(data.labels) / step)))
    if not numbers:
        raise InputError(f"{request.place}/dataset_test.json: expected test images, got none", option="data")
    data.check_files(numbers)
    loaded = request.load(World())
    classes = number_of_classes(loaded.model, loaded.size)
    if classes < len(data.classes):
        raise InputError(
            f"model: expected an output for each of the {len(data.classes)} classes of {request.place}, got "
            f"{classes}. Give a model that was trained on them.",
            option="model",
        )
    model = adapt(loaded).model
    one = replace(
        request,
        suite=None,
        model=loaded,
        words=None,
        data=_Images(data, loaded.preprocess, numbers),
        metrics=NAMES if tuple(request.metrics) == DEFAULT_METRICS else request.metrics,
        limit=None,
    )
    setattr(model, SUITE, PartTruth(data, loaded.preprocess, numbers))
    try:
        return run(one)
    finally:
        delattr(model, SUITE)


def summary(rows: Rows) -> pd.DataFrame:
    """The scores of the paper in percent: a line for each method and score that it explains.

    Columns: csdc, pc, dc and distractibility at the threshold of largest completeness, that `threshold` (a
    share, 0..1), com, cor, con, and `mean`, that of the last three.
    """
    import pandas as pd

    frame = rows.to_pandas()
    lines = {}
    for line, own in frame.groupby(["method", "score"], observed=True, sort=False):
        by_metric = dict(iter(own.groupby("metric", observed=True)))
        scores: dict[str, float] = {}
        if NAMES[0] in by_metric:
            details = [None if d is None else list(d) for d in by_metric[NAMES[0]]["detail"]]
            position, scores = best_threshold(details)
            scores["threshold"] = float(THRESHOLDS[position])
        for short, name in zip(("com", "cor", "con"), NAMES, strict=False):
            if name in by_metric:
                part = by_metric[name]
                scores[short] = METRICS[name].combine(part["value"].to_numpy(), list(part["detail"]))
        lines[line] = scores
    table = pd.DataFrame.from_dict(lines, orient="index")
    table.index = pd.MultiIndex.from_tuples(table.index, names=["method", "score"])
    shown = [name for name in ("com", "cor", "con") if name in table]
    return table.assign(mean=table[shown].mean(axis=1)).sort_values("mean", ascending=False)
