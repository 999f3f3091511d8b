"""The jobs of a stress run: a batch of images under one condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steadygaze.runs.stress.images import RunImage, StressJob
from steadygaze.runs.stress.suite import Condition, ImageSet

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
