"""Draws the sample images of a finished run and stores them in its folder (`runs/samples.py`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steadygaze.errors import DegenerateMapWarning, SteadygazeError
from steadygaze.faithfulness.inputs import Batch, CachedForward
from steadygaze.methods.explain import explain, explain_batch
from steadygaze.results.attribution import Attribution
from steadygaze.results.drawing import to_pil_image
from steadygaze.results.map_files import StoredMethod
from steadygaze.runs.evaluator import Evaluator
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.plan import Column
from steadygaze.runs.ranking import Line, Section
from steadygaze.runs.request import CHANCE
from steadygaze.runs.rows import Rows
from steadygaze.runs.samples import (
    ConditionSample,
    ImageSample,
    MapSample,
    Samples,
    VerifySamples,
    read_map_samples,
    read_setting_samples,
    save_image,
    thumbnail,
    write_index,
)
from steadygaze.runs.source import ImageView, ViewLoader
from steadygaze.runs.suite import Suite
from steadygaze.target import Outputs, describe, predictions
from steadygaze.vit.view import ViT

EACH = 4  # best images, and as many worst ones
MOST = 64  # images with thumbnail and map


def store_map_samples(
    out: Path,
    rows: Rows,
    columns: Sequence[Column],
    vit: ViT,
    batches: Callable[[Sequence[str]], Iterator[Batch]],
    target_of: Callable[[Batch, CachedForward], Tensor],
    class_names: Sequence[str] | None,
) -> None:
    """Store the samples of a finished run of verify, unless the same ones are there.

    Args:
        columns: Of the run; the leading ones are shown.
        batches: Reads images again, by name, each as a batch of one.
    """
    sections = rows.table(repeats=1).sections
    if not sections:
        return
    section = sections[0]
    metric = section.shown[0]
    leading = leading_columns(section, columns)
    if not leading:
        return
    lines = [(column.method.name, column.score) for column in leading]
    best, worst = extremes(section, metric, lines[0])
    before = read_map_samples(out)
    if before is not None and before.methods == lines and before.metric == metric:
        stored = [[sample.name for sample in group] for group in (before.best, before.worst)]
        if stored == [best, worst]:
            return
    arrays = [section.array(metric, line) for line in lines]
    try:
        samples = {}
        for number, batch in enumerate(batches(list(dict.fromkeys([*best, *worst])))):
            name = batch.names[0]
            index = section.names.index(name)
            title, files = _draw_maps(out, number, batch, leading, vit, target_of, class_names)
            samples[name] = MapSample(name, title, [float(values[index]) for values in arrays], files)
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
    score). Orders that were searched are left out: drawing them would search again.
    """
    by_line = {(column.method.name, column.score): column for column in columns}
    drawn = (line for line in section.lines if line not in section.searched)
    ranked = [by_line[line] for line in drawn if line in by_line]
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
    if section.quantity(metric).better == "higher":
        order.reverse()
    each = min(EACH, len(order) // 2)
    return [section.names[i] for i in order[:each]], [section.names[i] for i in order[::-1][:each]]


def _draw_maps(
    out: Path,
    number: int,
    batch: Batch,
    columns: Sequence[Column],
    vit: ViT,
    target_of: Callable[[Batch, CachedForward], Tensor],
    class_names: Sequence[str] | None,
) -> tuple[str, list[str]]:
    """Store an image and its map by each method; returns what is explained, and the file names."""
    batch = batch.to(next(vit.model.parameters()).device)
    forward = CachedForward.of(vit, batch.images)
    target = target_of(batch, forward)
    image = thumbnail(_shown(batch))
    files = [save_image(out, f"image{number}", image)]
    for k, column in enumerate(columns):
        attribution = _attribution(column, forward, target, batch.names)
        files.append(save_image(out, f"image{number}-map{k}", attribution.overlay(image)))
    with torch.no_grad():
        numbers = predictions(vit.plan.outputs, forward.logits[0])
    return _title(vit.plan.outputs, numbers, int(target[0]), class_names), files


def _attribution(column: Column, forward: CachedForward, target: Tensor, names: Sequence[str]) -> Attribution:
    m = column.method
    if isinstance(m, StoredMethod):
        height, width = forward.images.shape[-2:]
        scores, _ = m.batch(names, target.tolist(), forward.grid, (height, width))
        outputs = forward.vit.plan.outputs
        return Attribution(scores, target, forward.logits, m.name, column.score, outputs=outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMapWarning)
        return explain_batch(forward, target, [m], column.score)[m.name]


def _shown(batch: Batch) -> Image.Image:
    """The image that the model sees, with the normalization undone."""
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


@dataclass(frozen=True)
class SettingSampler:
    """Stores the samples of a stress run.

    Attributes:
        method: Of the maps.
        class_names: Of the model, if they are known.
    """

    out: Path
    evaluator: Evaluator
    suites: Sequence[Suite]
    loader: ViewLoader
    method: str
    class_names: Sequence[str] | None

    @property
    def stored(self) -> bool:
        """Whether the folder has the samples of this run."""
        before = read_setting_samples(self.out)
        return before is not None and before.method == self.method

    def store(self, images: Sequence[RunImage]) -> None:
        """Store the samples, unless they are there. images: of the data, in its order."""
        if not images or self.stored:
            return
        try:
            shown = self.first_readable(images)
            if shown is None:
                return
            samples = self.images(images[:MOST])
            classes = sorted({c for sample in samples for c in (sample.label, sample.predicted)})
            names = self.class_names
            record = Samples(
                shown.name,
                self.method,
                self.conditions(shown),
                samples,
                {} if names is None else {c: names[c] for c in classes},
                "".join(f", {suite.samples_note}" for suite in self.suites if suite.samples_note),
            )
            write_index(self.out, asdict(record))
        except (SteadygazeError, OSError) as error:  # the rows are what counts
            warnings.warn(f"no sample images are stored with the run: {error}", stacklevel=2)

    def first_readable(self, images: Sequence[RunImage]) -> RunImage | None:
        """The first image by name that can be read."""
        for image in sorted(images, key=lambda image: image.name):
            try:
                self.loader.pixels(image)
            except SteadygazeError:
                continue
            return image
        return None

    def conditions(self, image: RunImage) -> list[ConditionSample]:
        """Store one image under the conditions of each suite."""
        view = ImageView(image, self.loader)
        samples = [sample for suite in self.suites for sample in suite.samples(self.evaluator, view)]
        stored = []
        for number, sample in enumerate(samples):
            shown = sample.image if sample.wide else thumbnail(sample.image)
            file = save_image(self.out, f"condition{number}", shown)
            stored.append(ConditionSample(sample.title, file, sample.wide))
        return stored

    def images(self, images: Sequence[RunImage]) -> list[ImageSample]:
        """Store thumbnails and maps of images; those that cannot be read are left out."""
        if any(suite.label_maps for suite in self.suites) or self.evaluator.outputs != "classes":
            return []
        stored = []
        for number, image in enumerate(images):
            try:
                pixels = self.loader.pixels(image)
            except SteadygazeError:
                continue
            tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
            shown = self.evaluator.normalize(tensor)
            probabilities = self.evaluator.logits(shown)[0].softmax(-1)
            predicted = int(probabilities.argmax())
            small = thumbnail(Image.fromarray(pixels))
            overlay = self._overlay(shown, predicted, small)
            stored.append(
                ImageSample(
                    image.name,
                    image.labels[0],
                    predicted,
                    round(float(probabilities[predicted]), 4),
                    save_image(self.out, f"image{number}", small),
                    None if overlay is None else save_image(self.out, f"map{number}", overlay),
                )
            )
        return stored

    def _overlay(self, image: Tensor, predicted: int, small: Image.Image) -> Image.Image | None:
        if self.evaluator.vit is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DegenerateMapWarning)
                attribution = explain(self.evaluator.vit, image, target=predicted, method=self.method)
            return attribution.overlay(small)
        except SteadygazeError:  # the method does not serve this model, or the map is broken
            return None
