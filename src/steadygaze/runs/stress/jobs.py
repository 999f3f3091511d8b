"""The jobs of a stress run, each a batch of images under one condition, and the settings that define them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from steadygaze import __version__
from steadygaze.manifest import versions
from steadygaze.runs.request import task_setting
from steadygaze.runs.rows import STRESS
from steadygaze.runs.stress.images import RunImage, StressJob
from steadygaze.runs.stress.quantities import quantity_record
from steadygaze.runs.stress.setting import CLEAN
from steadygaze.runs.stress.sources import FolderData, StreamData
from steadygaze.runs.stress.suite import Condition, ImageSet, Suite

if TYPE_CHECKING:
    from steadygaze.runs.stress.evaluator import Evaluator
    from steadygaze.runs.stress.request import StressRequest

VIEWS_PER_JOB = 64  # images that one job makes, about; sequences make 31 of each


def batch_jobs(
    images: Sequence[RunImage],
    conditions: Sequence[Condition],
    number: int,
    references: tuple[StressJob, ...] = (),
) -> Iterator[StressJob]:
    """A batch under every condition; conditions that make many views of an image take few images at a
    time."""
    for condition in conditions:
        step = len(images) if condition.views <= 2 else max(1, VIEWS_PER_JOB // condition.views)
        for some in split_images(images, 1 if condition.single else step):
            yield StressJob(
                tuple(image.name for image in some),
                tuple((setting, "", metric) for setting, metric in condition.rows),
                batch=number,
                work=len(some) * condition.views,
                requires=references,
                run_images=some,
                condition=condition,
            )


def data_jobs(data: FolderData | StreamData, conditions: Sequence[Condition]) -> Iterator[StressJob]:
    """The images of the data, batch by batch."""
    for number, batch in enumerate(data.batches()):
        yield from batch_jobs(batch.images, conditions, number)


def set_jobs(image_sets: Sequence[ImageSet], batch_size: int, number: int = 0) -> Iterator[StressJob]:
    """The images of the suites' own sets. number: of the first batch."""
    for image_set in image_sets:
        references = reference_jobs(image_set, batch_size)
        for images in split_images(image_set.images, batch_size):
            yield from batch_jobs(images, image_set.conditions, number, references)
            number += 1


def reference_jobs(image_set: ImageSet, size: int) -> tuple[StressJob, ...]:
    """Jobs that show the references of a set to its suite; they have no rows."""
    if not image_set.references:
        return ()
    condition = Condition(image_set.conditions[0].suite, (), ())
    return tuple(
        StressJob(
            tuple(image.name for image in some),
            (),
            run_images=some,
            condition=condition,
            set_name=image_set.name,
        )
        for some in split_images(image_set.references, size)
    )


def split_images(images: Sequence[RunImage], size: int) -> list[tuple[RunImage, ...]]:
    """Groups of at most `size` images, in order."""
    return [tuple(images[start : start + size]) for start in range(0, len(images), size)]


def run_settings(
    request: StressRequest,
    evaluator: Evaluator,
    suites: Sequence[Suite],
    conditions: Sequence[Condition],
    image_sets: Sequence[ImageSet],
    identity: dict[str, str],
    facts: dict[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """Everything that defines the numbers of a run."""
    own = [condition for image_set in image_sets for condition in image_set.conditions]
    everywhere = [*(conditions if facts.get("pictures") != 0 else ()), *own]
    settings = dict.fromkeys(setting for condition in everywhere for setting in condition.settings)
    quantities = dict.fromkeys(metric for condition in everywhere for metric in condition.metrics)
    set_images = {
        setting.label: len(image_set.images)
        for image_set in image_sets
        for condition in image_set.conditions
        for setting in condition.settings
    }
    suite_facts: dict[str, Any] = {}
    for suite in suites:
        suite_facts |= suite.facts()
    return {
        "kind": STRESS,
        **identity,
        **facts,
        "suite": [suite.name for suite in suites if suite.name != CLEAN.suite],
        **suite_facts,
        "conditions": [setting.record() for setting in settings],
        "quantities": [quantity_record(quantity) for quantity in quantities],
        "set_images": set_images,
        "classes": evaluator.classes,
        **({} if "segments" in facts else task_setting(evaluator.outputs)),
        "batch": evaluator.batch_size,
        "seed": request.seed,
        "notes": notes,
        "versions": {"steadygaze": __version__, **versions()},
    }
