"""Pictures x conditions, job by job.

A job's composition depends on the order of the data and the batch size alone; batch b belongs to process b % world. Each
job's rows are written at once, so a run that is killed loses one job, and what it has is that of a run that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygaze.robustness.shifts import Shift
from steadygaze.runs.loop import Told, World
from steadygaze.runs.rows import Row
from steadygaze.runs.store import Done, Key, key_of
from steadygaze.runs.stress_data import Job, Maker, Picture, PictureSource, made_ahead
from steadygaze.runs.stress_measure import Judge
from steadygaze.runs.stress_neighbours import Neighbours
from steadygaze.runs.stress_suite import Condition, Plan

AT_ONCE = 64  # pictures that one job makes, about; sequences make 31 of each


@dataclass
class Pace:
    """Seconds that the model worked, and that it waited for pictures or for the disk."""

    model: float = 0.0
    waiting: float = 0.0

    @property
    def share(self) -> float:
        """Share of the time in the model, 0..1."""
        return self.model / (self.model + self.waiting) if self.model else 0.0


@dataclass(frozen=True)
class Batch:
    """Pictures that are shown together, and the conditions they go through."""

    pictures: tuple[Picture, ...]
    conditions: tuple[Condition, ...]

    @property
    def expected(self) -> int:
        """Rows of one picture."""
        return sum(len(c.rows) for c in self.conditions)

    def jobs(self) -> Iterator[Job]:
        """Conditions that make many pictures of one take a few pictures at a time."""
        for condition in self.conditions:
            step = len(self.pictures) if condition.pictures <= 2 else max(1, AT_ONCE // condition.pictures)
            step = 1 if condition.kind == "clip" else step  # films differ in length
            for start in range(0, len(self.pictures), step):
                yield Job(self.pictures[start : start + step], condition)


def batches(pictures: Sequence[Picture], conditions: Sequence[Condition], size: int) -> list[Batch]:
    return [Batch(tuple(pictures[i : i + size]), tuple(conditions)) for i in range(0, len(pictures), size)]


def shift_batches(shift: Shift, number: int, plan: Plan, limit: int | None) -> list[Batch]:
    """The pictures of a shift; of ImageNet-C and -P, those of each corruption and severity by themselves, `limit` of each."""
    apart = shift.name in ("imagenet-c", "imagenet-p")
    groups: dict[str, list[Picture]] = {}
    for item in shift.items:
        group = groups.setdefault(item.group if apart else "", [])
        if limit is None or len(group) < limit:
            group.append(Picture.shifted(item, shift, number))
    return [
        b
        for group, found in groups.items()
        for b in batches(found, [plan.of_shift(shift, group)], plan.batch)
    ]


def bank_jobs(sets: Sequence[PictureSource], size: int, jobs: Sequence[Job] | None = None) -> list[Job]:
    """The banks of all sets of neighbours, or of those that `jobs` ask; they go before them."""
    wanted = (
        None
        if jobs is None
        else {p.shift for job in jobs if job.condition.kind == "neighbours" for p in job.pictures[:1]}
    )
    found = [
        s
        for number, s in enumerate(sets)
        if isinstance(s, Neighbours) and (wanted is None or number in wanted)
    ]
    return [
        Job(s.bank[i : i + size], Condition("bank", s.name))
        for s in found
        for i in range(0, len(s.bank), size)
    ]


def mine(all_batches: Iterable[Batch], place: World) -> list[Batch]:
    """The batches of this process."""
    return [batch for number, batch in enumerate(all_batches) if number % place.size == place.rank]


def pending(some: Sequence[Batch], done: Done, maker: Maker) -> tuple[list[Job], set[Key], set[str]]:
    """The jobs that lack rows, the rows that are there of pictures that are not finished, and pictures that could not be
    read before but can be now."""
    begun = [p.name for b in some for p in b.pictures if 0 < done.counts.get(p.name, 0) < b.expected]
    there = done.keys(begun)
    lost = {p.name: p for b in some for p in b.pictures if p.name in done.unreadable}
    again = {name for name, picture in lost.items() if maker.readable(picture)}
    jobs = []
    for batch in some:
        wanted = {
            p.name
            for p in batch.pictures
            if done.counts.get(p.name, 0) < batch.expected and (p.name not in lost or p.name in again)
        }
        if wanted:
            jobs += [
                job
                for job in batch.jobs()
                if any(p.name in wanted and not _has(there, p, job.condition) for p in job.pictures)
            ]
    return jobs, there, again


def _has(there: set[Key], picture: Picture, condition: Condition) -> bool:
    return all((picture.name, setting, "", metric) in there for setting, metric in condition.rows)


def carry_out(
    some: Sequence[Batch],
    maker: Maker,
    judge: Judge,
    identity: dict[str, Any],
    append: Callable[[list[Row]], None],
    done: Done,
    told: Told = lambda finished, computed: None,
    workers: int = 0,
    pace: Pace | None = None,
    given: dict[str, Tensor] | None = None,
) -> None:
    """Compute what is missing of these batches. given: normalised images by name, which are shown as they are where a
    condition leaves the picture alone."""
    pace = pace or Pace()
    jobs, there, again = pending(some, done, maker)
    total = total_work(some, maker.sets, judge.plan.batch)
    jobs = [*bank_jobs(maker.sets, judge.plan.batch, jobs), *jobs]
    told(total - sum(work(job) for job in jobs), 0)
    known = {name: why for name, why in done.unreadable.items() if name not in again}
    finished = {
        name for b in some for name in (p.name for p in b.pictures) if done.counts.get(name, 0) >= b.expected
    }
    for name in sorted(again):
        append([{"image": name, "unreadable": ""}])
    clock = time.perf_counter()
    for made in made_ahead(jobs, maker, workers):
        if made.error is not None:
            raise made.error
        job, rows = jobs[made.number], []
        for name, why in made.failed.items():
            if known.get(name) != why:
                known[name] = why
                rows.append({"image": name, "unreadable": why})
        began = time.perf_counter()
        pace.waiting += began - clock
        if made.images is not None and job.condition.kind == "bank":
            judge.remember(job, made.places, made.images)
        elif made.images is not None:
            images = made.images
            if given is not None and job.condition.plain:
                images = torch.stack([given[job.pictures[place].name] for place in made.places])[:, None]
            found = judge.rows(job, made.places, images, identity, made.labels)
            rows += [row for row in found if row["image"] not in finished and key_of(row) not in there]
        clock = time.perf_counter()
        pace.model += clock - began
        if rows:
            append(rows)
        told(work(job), work(job))


def total_work(some: Sequence[Batch], sets: Sequence[PictureSource], size: int) -> int:
    """All work of these batches, and of the banks that every process takes in."""
    return sum(work(job) for batch in some for job in batch.jobs()) + sum(map(work, bank_jobs(sets, size)))


def work(job: Job) -> int:
    """How much a job is, in pictures that the model is shown."""
    return len(job.pictures) * job.condition.pictures
