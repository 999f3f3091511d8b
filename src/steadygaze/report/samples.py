"""Images that stress runs stored in their folders, for pages. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steadygaze.runs.compare import Comparison
from steadygaze.runs.samples import data_address
from steadygaze.runs.stress.samples import ImageSample, Samples, read_samples
from steadygaze.target import percent

Titled = list[tuple[str, str]]  # words and data address
NOT_STORED = (
    "Images are left out: the run stored none (it was made in memory, by version 0.1, or is unfinished)."
)


@dataclass(frozen=True)
class Shot:
    """An image with what was made of it: (words, data address)."""

    name: str
    title: str
    images: Titled


def condition_images(run: Path) -> tuple[Titled, Titled, str]:
    """One image under the conditions of the run's suites, sheets of several images, and what they are."""
    samples = read_samples(run)
    if samples is None:
        return [], [], NOT_STORED
    small = [(one.title, data_address(run, one.file)) for one in samples.conditions if not one.wide]
    sheets = [(one.title, data_address(run, one.file)) for one in samples.conditions if one.wide]
    text = f"{samples.image} as the model sees it, and under conditions of the run{samples.note}."
    return small, sheets, text if small or sheets else ""


def shots_of(
    comparison: Comparison, names: Mapping[str, Sequence[str]], show: int
) -> tuple[dict[str, list[Shot]], str]:
    """The first images of each group of names that both runs stored, with the maps of both models, and what
    they are."""
    folders = [card.folder for card in (comparison.before[0], comparison.after[0])]
    stored = [None if folder is None else read_samples(folder) for folder in folders]
    before, after = stored
    if before is None or after is None or folders[0] is None or folders[1] is None:
        return {}, NOT_STORED
    by_name = [{image.name: image for image in samples.images} for samples in (before, after)]
    shots: dict[str, list[Shot]] = {}
    for group, wanted in names.items():
        both = [name for name in wanted if name in by_name[0] and name in by_name[1]][:show]
        shots[group] = [
            _shot((folders[0], before, by_name[0][name]), (folders[1], after, by_name[1][name]))
            for name in both
        ]
    methods = " and ".join(dict.fromkeys((before.method, after.method)))
    count = min(len(before.images), len(after.images))
    what = f"Clean images with maps by {methods}, of the class each model predicts"
    text = f"{what}; the runs stored {count} images."
    return shots, text


def _shot(before: tuple[Path, Samples, ImageSample], after: tuple[Path, Samples, ImageSample]) -> Shot:
    run, samples, image = before
    images = [("image", data_address(run, image.file))]
    for side, (folder, own, one) in (("before", before), ("after", after)):
        words = f"{side}: {_class_name(own, one.predicted)} {percent(one.probability)}"
        images.append((words, data_address(folder, one.map_file or one.file)))
    return Shot(image.name, _class_name(samples, image.label), images)


def _class_name(samples: Samples, index: int) -> str:
    name = samples.class_names.get(index)
    return f"class {index}" if name is None else name.split(",")[0]
