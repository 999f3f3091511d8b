"""Before and after in one record: `stress` and `verify` of two models on the same pictures, and what differs in faithfulness.

A side is a model (a name as for `load_model`, NAME@FILE with weights, or a folder that `steadygaze train` wrote), and is measured into
OUT/before or OUT/after; or it is such a folder from before, with stress/ and verify/ in it, and is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steadygaze.errors import BadInput
from steadygaze.method_registry import DEFAULT
from steadygaze.progress import Progress
from steadygaze.quantity import mean
from steadygaze.runs.processes import World
from steadygaze.runs.rows import Rows
from steadygaze.runs.stress_request import Request as StressRequest
from steadygaze.runs.stress_request import prepare_stress, stress_run
from steadygaze.runs.stress_suite import Options
from steadygaze.runs.table import difference
from steadygaze.runs.verify.request import VerifyRequest, prepare_verify, run_verify
from steadygaze.runs.verify.summary import Line, Section, quantity

SUITE = ("corruptions", "attacks", "occlusion", "attention")
Step = Callable[
    [str, int], Any
]  # what is done next, and how many pictures it shows -> a context that is told of them


@dataclass(frozen=True)
class Shift:
    """One faithfulness number of a method, before and after: after minus before with its paired 95 % interval."""

    method: str
    metric: str
    before: float
    after: float
    difference: float
    low: float
    high: float
    images: int

    @property
    def verdict(self) -> str:
        """better or worse where the interval leaves zero out; otherwise nothing."""
        if not (self.low > 0 or self.high < 0):
            return ""
        return "better" if (self.difference > 0) == (quantity(self.metric).better == "higher") else "worse"


@dataclass(frozen=True)
class Ask:
    """What is measured of both sides."""

    data: Path | None
    out: Path
    suite: Sequence[str] = SUITE
    methods: Sequence[str] = (DEFAULT,)
    metrics: Sequence[str] = ()
    masks: Path | None = None
    options: Options | None = None
    limit: int | None = None
    seed: int = 0
    batch: int = 16
    device: str = "auto"
    command: str = ""


def measured(side: str, which: str, ask: Ask, place: World, step: Step) -> Path:
    """The folder with stress/ and verify/ of a side, measured now unless it is one already."""
    there = Path(side)
    if (there / "stress" / "run.json").is_file() and (there / "verify" / "run.json").is_file():
        return there
    if (there / "run.json").is_file():
        raise BadInput(
            f"{side} holds one run alone: expected a model, or a folder with stress/ and verify/. For stress: compare-models."
        )
    if ask.data is None:
        raise BadInput(f"{side} is a model that is to be measured: expected --data FOLDER")
    name, _, file = side.partition("@")
    checkpoint = Path(file) if file else None
    out = ask.out / which
    common: dict[str, Any] = {
        "model": name, "data": ask.data, "checkpoint": checkpoint, "masks": ask.masks, "limit": ask.limit, "seed": ask.seed,
        "batch": ask.batch, "device": ask.device, "command": ask.command,
    }  # fmt: skip
    strong = StressRequest(
        **common, out=out / "stress", suite=list(ask.suite), options=ask.options or Options()
    )
    ready = prepare_stress(strong, place)
    with step(f"stressing {which}", ready.work(place)) as told:
        stress_run(strong, place, told, ready)
    common["batch_size"] = common.pop("batch")
    more: dict[str, Any] = {"metrics": list(ask.metrics)} if ask.metrics else {}
    true = VerifyRequest(**common, out=out / "verify", methods=list(ask.methods), **more)
    prepared = prepare_verify(true, place)
    with step(f"verifying {which}", prepared.source.count or 0) as told:
        before = 0

        def report(progress: Progress) -> None:
            nonlocal before
            told(progress.done - before, progress.done - before)
            before = progress.done

        run_verify(true, place, report, prepared)
    return out


def faithfulness(before: Path, after: Path) -> list[Shift]:
    """Every metric of every method that both sides have, over the pictures that both have."""
    one, two = (_section(folder) for folder in (before, after))
    found = []
    for metric in one.shown:
        for line in one.lines_of(metric):
            if metric in two.shown and line in two.lines_of(metric):
                found.append(_shift(one, two, metric, line))
    if not found:
        raise BadInput(
            f"{before} and {after} have no method and metric in common: verify both with the same ones"
        )
    return found


def _section(folder: Path) -> Section:
    sections = Rows.read(folder).table().sections
    if len(sections) != 1:
        raise BadInput(f"{folder}: expected the rows of one model on one data set, got {len(sections)}")
    return sections[0]


def _shift(one: Section, two: Section, metric: str, line: Line) -> Shift:
    common = sorted(set(one.names) & set(two.names))
    if not common:
        raise BadInput("the two sides have no picture in common: give the same data")
    places = [[section.names.index(name) for name in common] for section in (two, one)]
    values = np.stack([section.array(metric, line)[p] for section, p in zip((two, one), places, strict=True)])
    details = (
        [section.detail(metric, line) for section in (two, one)]
        if quantity(metric).combine is not mean
        else [None, None]
    )
    known = [d[p] for d, p in zip(details, places, strict=True) if d is not None]
    pair = np.stack(known) if len(known) == len(details) else None
    gap, low, high = difference(
        values, pair, combine=quantity(metric).combine, repeats=one.repeats, seed=one.seed
    )
    was, now = (section.cells[metric, line].value for section in (one, two))
    return Shift("/".join(line), metric, was, now, gap, low, high, int((~np.isnan(values).any(0)).sum()))
