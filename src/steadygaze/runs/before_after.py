"""Before and after on one page: `stress` and `verify` of two models on the same images, and what differs in
faithfulness.

A side is a model (a name for `load_model`, NAME@FILE with weights, or a folder that `steadygaze train`
wrote), which is measured into OUT/before or OUT/after; or the folder OUT/before of an earlier card, with
stress/ and verify/ in it, which is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import InputError
from steadygaze.methods.registry import DEFAULT
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.quantity import Quantity, mean
from steadygaze.runs.ranking import Line, Section
from steadygaze.runs.request import DEFAULT_METRICS, StressRequest, VerifyRequest
from steadygaze.runs.rows import Rows, read_run
from steadygaze.runs.shards import World
from steadygaze.runs.statistics import difference
from steadygaze.untrusted import damaged_files

if TYPE_CHECKING:
    from steadygaze.data.memory import Data
    from steadygaze.loading.loaded import LoadedModel

SUITES = ("corruptions", "attacks", "occlusion", "attention")


@dataclass(frozen=True)
class FaithfulnessChange:
    """One faithfulness number of a method, before and after: after minus before with its paired 95 %
    interval. after_low, after_high: the 95 % interval of the number after."""

    method: str
    metric: str
    before: float
    after: float
    difference: float
    low: float
    high: float
    images: int
    quantity: Quantity
    after_low: float
    after_high: float

    @property
    def verdict(self) -> str:
        """better or worse where the interval excludes zero; otherwise empty."""
        if not (self.low > 0 or self.high < 0):
            return ""
        return "better" if self.difference * self.quantity.sign > 0 else "worse"


@dataclass(frozen=True)
class CardRequest:
    """What is measured of both sides. options: of the suites; model_options: of `load_model`, for both."""

    data: Data | None
    out: Path
    suites: Sequence[str] = SUITES
    methods: Sequence[str] = (DEFAULT,)
    metrics: Sequence[str] = ()
    masks: Path | None = None
    groups: Sequence[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    seed: int = 0
    batch_size: int = 16
    device: str = "auto"
    command: str = ""


@dataclass(frozen=True)
class Side:
    """A model before it is measured, or the folder of an earlier measurement.

    Attributes:
        name: As it was given.
        folder: With stress/ and verify/, now or in the end.
        classes: Number of classes; None if an earlier run does not say.
        class_names: By class; of an earlier run, those of its images.
        loaded: The model that is to be measured; None for an earlier measurement.
        stress: The run that is to be made.
        verify: The run after it.
    """

    name: str
    folder: Path
    classes: int | None
    class_names: Mapping[int, str]
    loaded: LoadedModel | None = None
    stress: StressRequest | None = None
    verify: VerifyRequest | None = None


def measure_sides(
    before: str, after: str, request: CardRequest, world: World, on_progress: OnProgress = ignore_progress
) -> list[Path]:
    """The folders with stress/ and verify/ of both sides, measured now unless they are such folders. The
    classes of both are compared before the data is read."""
    sides = [_side(side, name, request, world) for side, name in ((before, "before"), (after, "after"))]
    _check_classes(*sides)
    if any(side.stress is not None for side in sides):  # runs that exist are read without importing torch
        from steadygaze.runs.stress import prepare_stress, run_stress
        from steadygaze.runs.verify import prepare_verify, run_verify

        prepared = {  # both sides, before either is measured
            side.folder: prepare_stress(side.stress, world, side.loaded) for side in sides if side.stress
        }
        for side in sides:
            if side.stress is not None and side.verify is not None:
                run_stress(side.stress, world, on_progress, prepared[side.folder])
                run_verify(side.verify, world, on_progress, prepare_verify(side.verify, world))
    return [side.folder for side in sides]


def _side(side: str, name: str, request: CardRequest, world: World) -> Side:
    folder = Path(side)
    if (folder / "stress" / "run.json").is_file() and (folder / "verify" / "run.json").is_file():
        run = read_run(folder / "stress")
        names = {int(label): words for label, words in run.get("about", {}).get("classes", {}).items()}
        return Side(side, folder, run["settings"].get("classes"), names)
    if (folder / "run.json").is_file():
        raise InputError(
            f"{side} contains a single run: expected a model, or a folder with stress/ and verify/. "
            "Compare stress runs with compare-models."
        )
    if request.data is None:
        raise InputError(
            f"{side} is a model that has not been measured: expected a folder of data", option="data"
        )
    model, _, file = side.partition("@")
    out = request.out / name
    common: dict[str, Any] = {
        "model": model,
        "data": request.data,
        "checkpoint": Path(file) if file else None,
        "masks": request.masks,
        "model_options": request.model_options,
        "limit": request.limit,
        "seed": request.seed,
        "batch_size": request.batch_size,
        "device": request.device,
        "command": request.command,
    }
    stress = StressRequest(
        **common,
        out=out / "stress",
        suites=list(request.suites),
        groups=request.groups,
        options=request.options,
        map_method=request.methods[0],
    )
    verify = VerifyRequest(
        **common,
        out=out / "verify",
        methods=list(request.methods),
        metrics=list(request.metrics) or DEFAULT_METRICS,
        random=True,
    )
    from steadygaze.runs.evaluator import class_count
    from steadygaze.runs.stress import parse_suites

    suites = parse_suites(stress.suites, stress.options)  # a wrong name is an error before a model is loaded
    loaded = stress.load(world)
    classes = class_count(loaded.model, loaded.size, any(suite.label_maps for suite in suites))
    names = dict(enumerate(loaded.class_names)) if loaded.class_names else {}
    return Side(side, out, classes, names, loaded, stress, verify)


def _check_classes(before: Side, after: Side) -> None:
    """Numbers of two models are differences only if their classes are the same."""
    if None not in (before.classes, after.classes) and before.classes != after.classes:
        raise InputError(
            f"expected two models of the same classes, got {before.name} with {before.classes} classes and "
            f"{after.name} with {after.classes}. Nothing was measured."
        )
    shared = [label for label in before.class_names if label in after.class_names]
    names = [(_plain(before.class_names[label]), _plain(after.class_names[label])) for label in shared]
    other = [(label, *pair) for label, pair in zip(shared, names, strict=True) if pair[0] != pair[1]]
    if 2 * len(other) > len(shared):  # a few may be spelled in another way
        examples = "; ".join(f"{label}: {was}, {now}" for label, was, now in other[:3])
        raise InputError(
            f"expected two models of the same classes, got {before.name} and {after.name}, with other names "
            f"of {len(other)} of {len(shared)} ({examples}). Nothing was measured."
        )


def _plain(name: str) -> str:
    return name.partition(",")[0].replace("_", " ").strip().casefold()


def faithfulness_changes(before: Path, after: Path) -> list[FaithfulnessChange]:
    """Every metric of every method that both sides have, over the images that both have."""
    with damaged_files(before, after):
        one, two = _section(before), _section(after)
        changes = [
            _change(one, two, metric, line)
            for metric in one.shown
            for line in one.lines_of(metric)
            if metric in two.shown and line in two.lines_of(metric)
        ]
    if not changes:
        raise InputError(
            f"{before} and {after} have no method and metric in common: run verify on both with the "
            "same methods and metrics"
        )
    return changes


def _section(folder: Path) -> Section:
    sections = Rows.read(folder).table().sections
    if len(sections) != 1:
        raise InputError(f"{folder}: expected the rows of one model on one data set, got {len(sections)}")
    return sections[0]


def _change(one: Section, two: Section, metric: str, line: Line) -> FaithfulnessChange:
    common = sorted(set(one.names) & set(two.names))
    if not common:
        raise InputError("the two sides have no image in common: give the same data")
    ranks = [[section.names.index(name) for name in common] for section in (two, one)]
    pairs = list(zip((two, one), ranks, strict=True))
    values = np.stack([section.array(metric, line)[rank] for section, rank in pairs])
    quantity = one.quantity(metric)
    combine = quantity.combine
    details = None
    if combine is not mean:
        known = [(section.detail(metric, line), rank) for section, rank in pairs]
        if all(detail is not None for detail, _ in known):
            details = np.stack([detail[rank] for detail, rank in known if detail is not None])
    gap, low, high = difference(values, details, combine=combine, repeats=one.repeats, seed=one.seed)
    was, now = (section.cells[metric, line] for section in (one, two))
    images = int((~np.isnan(values).any(0)).sum())
    return FaithfulnessChange(
        "/".join(line), metric, was.value, now.value, gap, low, high, images, quantity, now.low, now.high
    )
