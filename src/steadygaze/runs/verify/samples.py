"""The images on which the leading method did best and worst, with maps, stored in the run's folder for the
report.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steadygaze.drawing import to_pil_image
from steadygaze.errors import DegenerateMap, SteadygazeError
from steadygaze.explainer import explain_batch
from steadygaze.faithfulness.inputs import Batch, CachedForward
from steadygaze.heatmap import Attribution
from steadygaze.maps import StoredMethod
from steadygaze.runs.samples import FOLDER, INDEX, read_index, save_image, thumbnail, write_index
from steadygaze.runs.untrusted.schema import read_record
from steadygaze.runs.verify.plan import Column
from steadygaze.runs.verify.summary import CHANCE, Line, Section, quantity
from steadygaze.target import Outputs, describe, predictions

if TYPE_CHECKING:
    from steadygaze.runs.rows import Rows
    from steadygaze.runs.verify.request import PreparedVerify

EACH = 4  # best images, and as many worst ones


@dataclass(frozen=True)
class MapSample:
    """An image, its values, and the files of the image and of one map for each method."""

    name: str
    title: str
    values: list[float]
    files: list[str]


@dataclass(frozen=True)
class VerifySamples:
    """Best and worst images of the first method by a metric, beside the second method."""

    methods: list[Line]
    metric: str
    best: list[MapSample]
    worst: list[MapSample]


def read_samples(run: Path) -> VerifySamples | None:
    """The samples of a run folder; None if it has none."""
    record = read_index(run)
    if record is None or "methods" not in record:
        return None
    return read_record(VerifySamples, record, str(run / FOLDER / INDEX))


def store_samples(out: Path, prepared: PreparedVerify, rows: Rows) -> None:
    """Store the samples of a finished run, unless the same ones are there."""
    sections = rows.table(repeats=1).sections
    if not sections:
        return
    section = sections[0]
    metric = section.shown[0]
    columns = leading_columns(section, prepared.plan.columns)
    if not columns:
        return
    lines = [(column.method.name, column.score) for column in columns]
    best, worst = extremes(section, metric, lines[0])
    before = read_samples(out)
    if before is not None and before.methods == lines and before.metric == metric:
        stored = [[sample.name for sample in group] for group in (before.best, before.worst)]
        if stored == [best, worst]:
            return
    try:
        names = list(dict.fromkeys([*best, *worst]))
        samples = {}
        for number, batch in enumerate(prepared.source.again(names)):
            values = _values(section, metric, lines, batch.names[0])
            samples[batch.names[0]] = _sample(out, prepared, columns, batch, number, values)
        record = VerifySamples(
            lines,
            metric,
            [samples[name] for name in best if name in samples],
            [samples[name] for name in worst if name in samples],
        )
        if samples:
            write_index(out, asdict(record))
    except (SteadygazeError, OSError) as error:  # the rows are complete: the report is shown without images
        warnings.warn(f"no sample images are stored with the run: {error}", stacklevel=2)


def leading_columns(section: Section, columns: Sequence[Column]) -> list[Column]:
    """The best column and the next one of another method (not the same with other options or another
    score).
    """
    by_line = {(column.method.name, column.score): column for column in columns}
    ranked = [by_line[line] for line in section.lines if line in by_line]
    if not ranked:
        return []
    others = [column for column in ranked[1:] if _family(column) != _family(ranked[0])]
    others.sort(key=lambda column: column.method.name == CHANCE)  # only if there is no other
    return [ranked[0], *(others or ranked[1:])[:1]]


def _family(column: Column) -> tuple[str | None, ...]:
    """Equal for the same method with other options or another score."""
    m = column.method
    return (m.name,) if isinstance(m, StoredMethod) else (m.base.name, m.aggregator)


def extremes(section: Section, metric: str, line: Line) -> tuple[list[str], list[str]]:
    """The names of the best and of the worst images, the most extreme first."""
    values = section.array(metric, line)
    order = [int(i) for i in np.argsort(values, kind="stable") if not np.isnan(values[i])]
    if quantity(metric).better == "higher":
        order.reverse()
    each = min(EACH, len(order) // 2)
    return [section.names[i] for i in order[:each]], [section.names[i] for i in order[::-1][:each]]


def _values(section: Section, metric: str, lines: Sequence[Line], name: str) -> list[float]:
    index = section.names.index(name)
    return [float(section.array(metric, line)[index]) for line in lines]


def _sample(
    out: Path,
    prepared: PreparedVerify,
    columns: Sequence[Column],
    batch: Batch,
    number: int,
    values: list[float],
) -> MapSample:
    batch = batch.to(prepared.device)
    forward = CachedForward.of(prepared.vit, batch.images)
    target = prepared.target_of(batch, forward)
    image = thumbnail(_shown(batch))
    files = [save_image(out, f"image{number}", image)]
    with torch.no_grad():
        outputs = prepared.vit.plan.outputs
        numbers = predictions(outputs, forward.logits[0])
    for k, column in enumerate(columns):
        attribution = _attribution(column, forward, target, batch.names)
        files.append(save_image(out, f"image{number}-map{k}", attribution.overlay(image)))
    class_names = None if prepared.loaded is None else prepared.loaded.class_names
    return MapSample(batch.names[0], _title(outputs, numbers, int(target[0]), class_names), values, files)


def _attribution(column: Column, forward: CachedForward, target: Tensor, names: Sequence[str]) -> Attribution:
    m = column.method
    if isinstance(m, StoredMethod):
        height, width = forward.images.shape[-2:]
        scores, _ = m.batch(names, target.tolist(), forward.grid, (height, width))
        outputs = forward.vit.plan.outputs
        return Attribution(scores, target, forward.logits, m.name, column.score, outputs=outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        return explain_batch(forward, target, [m], column.score)[m.name]


def _shown(batch: Batch) -> Image.Image:
    """The image that the model sees, with the normalisation undone."""
    assert batch.mean is not None and batch.std is not None
    image, mean, std = (x.detach().cpu().float() for x in (batch.images[0], batch.mean, batch.std))
    return to_pil_image((image * std[:, None, None] + mean[:, None, None]).clamp(0, 1))


def _title(outputs: Outputs, numbers: Tensor, target: int, class_names: Sequence[str] | None) -> str:
    """What is explained, and the predicted class if that is another."""
    names = [name.split(",")[0] for name in class_names] if class_names else None

    def named(index: int) -> str:
        return describe(outputs, index, float(numbers[index]), names, alone=len(numbers) == 1)

    predicted = int(numbers.argmax())
    if outputs != "classes" or predicted == target:
        return named(target)
    return f"{named(target)}; predicted: {named(predicted)}"
