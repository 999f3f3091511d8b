"""Images that reports show, stored with the run so that a report needs neither the model nor the data.

RUN/samples/ holds `samples.json` and JPEG files: one image under the conditions of each suite, and a
thumbnail with the attribution map of the predicted class for up to 64 images of the data, spread evenly over
its classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from steadygaze.errors import DegenerateMap, SteadygazeError
from steadygaze.explainer import explain
from steadygaze.runs.samples import FOLDER, INDEX, read_index, save_image, thumbnail, write_index
from steadygaze.runs.stress.images import ImageView, RunImage, StressJob
from steadygaze.runs.stress.sources import StreamData
from steadygaze.runs.untrusted.schema import read_record

if TYPE_CHECKING:
    from steadygaze.runs.stress.request import PreparedStress

MOST = 64  # images with thumbnail and map


@dataclass(frozen=True)
class ConditionSample:
    """One image under one condition: words and file. wide: a sheet of several images."""

    title: str
    file: str
    wide: bool = False


@dataclass(frozen=True)
class ImageSample:
    """A thumbnail of a clean image, the map of the predicted class (None: no map), and the prediction."""

    name: str
    label: int
    predicted: int
    probability: float
    file: str
    map_file: str | None = None


@dataclass(frozen=True)
class Samples:
    """What a run stored. image: the name of the image that is shown under conditions; method: of the maps."""

    image: str = ""
    method: str = ""
    conditions: Sequence[ConditionSample] = ()
    images: Sequence[ImageSample] = ()
    class_names: dict[int, str] = field(default_factory=dict)
    note: str = ""


def read_samples(run: Path) -> Samples | None:
    """The samples of a run folder; None if it has none (first version, or a run that was killed early)."""
    record = read_index(run)
    if record is None:
        return None
    return read_record(Samples, record, str(run / FOLDER / INDEX))


def store_samples(out: Path, ready: PreparedStress, jobs: Iterable[StressJob]) -> None:
    """Store the samples of a run, unless they are there. jobs: the first group, whose images are shown."""
    images = data_images(ready, jobs)
    if not images or are_stored(out, ready):
        return
    try:
        shown = first_readable(ready, images)
        if shown is None:
            return
        images_shown = image_samples(out, ready, images[:MOST])
        record = {
            "image": shown.name,
            "method": ready.request.map_method,
            "conditions": [asdict(one) for one in condition_samples(out, ready, shown)],
            "images": [asdict(one) for one in images_shown],
            "class_names": _names_of(ready, images_shown),
            "note": "".join(f", {s.samples_note}" for s in ready.suites.values() if s.samples_note),
        }
        write_index(out, record)
    except (SteadygazeError, OSError) as error:  # the rows are what counts
        warnings.warn(f"no sample images are stored with the run: {error}", stacklevel=2)


def are_stored(out: Path, ready: PreparedStress) -> bool:
    """Whether the folder has the samples of this run."""
    before = read_samples(out)
    return before is not None and before.method == ready.request.map_method


def first_readable(ready: PreparedStress, images: Sequence[RunImage]) -> RunImage | None:
    """The first image by name that can be read."""
    for image in sorted(images, key=lambda one: one.name):
        try:
            ready.loader.pixels(image)
        except SteadygazeError:
            continue
        return image
    return None


def _names_of(ready: PreparedStress, images: Sequence[ImageSample]) -> dict[int, str]:
    names = ready.class_names
    classes = {c for image in images for c in (image.label, image.predicted)}
    return {} if names is None else {c: names[c] for c in sorted(classes)}


def data_images(ready: PreparedStress, jobs: Iterable[StressJob]) -> list[RunImage]:
    """The images of the data, in its order; of a stream, the first ones."""
    if isinstance(ready.data, StreamData):
        return ready.data.first_images
    own = {image.name: image for job in jobs for image in job.run_images if image.reader is None}
    return list(own.values())


def condition_samples(out: Path, ready: PreparedStress, image: RunImage) -> list[ConditionSample]:
    """Store one image under the conditions of each suite."""
    view = ImageView(image, ready.loader)
    samples = [sample for suite in ready.suites.values() for sample in suite.samples(ready.evaluator, view)]
    stored = []
    for number, sample in enumerate(samples):
        shown = sample.image if sample.wide else thumbnail(sample.image)
        stored.append(
            ConditionSample(sample.title, save_image(out, f"condition{number}", shown), sample.wide)
        )
    return stored


def image_samples(out: Path, ready: PreparedStress, images: Sequence[RunImage]) -> list[ImageSample]:
    """Store thumbnails and maps of images; those that cannot be read are left out."""
    if any(suite.label_maps for suite in ready.suites.values()) or ready.evaluator.outputs != "classes":
        return []
    stored = []
    for number, image in enumerate(images):
        try:
            pixels = ready.loader.pixels(image)
        except SteadygazeError:
            continue
        tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
        shown = ready.evaluator.normalise(tensor)
        probabilities = ready.evaluator.logits(shown)[0].softmax(-1)
        predicted = int(probabilities.argmax())
        small = thumbnail(Image.fromarray(pixels))
        map_file = None
        overlay = _overlay(ready, shown, predicted, small)
        if overlay is not None:
            map_file = save_image(out, f"map{number}", overlay)
        stored.append(
            ImageSample(
                image.name,
                image.labels[0],
                predicted,
                round(float(probabilities[predicted]), 4),
                save_image(out, f"image{number}", small),
                map_file,
            )
        )
    return stored


def _overlay(ready: PreparedStress, image: torch.Tensor, predicted: int, small: Image.Image) -> Any:
    if ready.evaluator.vit is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateMap)
            attribution = explain(
                ready.evaluator.vit, image, target=predicted, method=ready.request.map_method
            )
        return attribution.overlay(small)
    except SteadygazeError:  # the method does not serve this model, or the map is broken
        return None
