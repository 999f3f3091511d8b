"""The protocol of a suite, and the registry of all suites. Nothing outside `suites/` knows a suite by name.

A suite owns everything about its subject: its conditions, how an image is made under a condition, what is
measured, the scores of the field that follow from the measurements, and its figures and tables. A run asks it
in this order:

| method | when | where |
| --- | --- | --- |
| `open` | before the model is loaded: read folders, check names | main process |
| `use_data`, `conditions`, `image_sets` | once the model is known | main process |
| `make` | for each image and condition | worker processes |
| `reference`, `measure` | for each batch | beside the model |
| `samples` | once, for reports | beside the model |
| `trial` | in a dry run | beside the model |
| `numbers`, `scores`, `tables`, `figures` | when a run is read | report, command line |

Reports import every suite, so a suite imports torch, and code that does, in the methods that measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float

from steadygaze.data.folders import Item
from steadygaze.errors import InputError
from steadygaze.notebook import Listing
from steadygaze.registry import Registry
from steadygaze.robustness.protocols import BINS
from steadygaze.runs.card import Card, SuiteResults
from steadygaze.runs.groups import WORST_GROUP, group_figures, group_scores, group_tables
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.request import SUITE_OPTIONS
from steadygaze.runs.settings import (
    CLEAN,
    CONFIDENCE,
    ECE,
    TOP1,
    TOP5,
    BarChart,
    Condition,
    Figure,
    Measurement,
    SampleImage,
    Score,
    Table,
    Views,
    bar,
)
from steadygaze.runs.statistics import draws

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView
    from steadygaze.target import Outputs


@dataclass(frozen=True)
class Option:
    """An option of a suite, accepted by `sg.stress(..., NAME=VALUE)` and by `steadygaze stress --NAME VALUE`.

    Attributes:
        parse: From what the user gave (on the command line always text) to the checked value; raises
            InputError.
        default: The checked value that holds if the option is not given.
        help: Empty for the options that `SUITE_OPTIONS` of `runs/request.py` describes.
        must_serve: Whether giving it is an error unless a requested suite has this option.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any
    help: str = ""
    must_serve: bool = False


@dataclass(frozen=True)
class ImageSet:
    """Images of a suite's own, with their conditions; their names are SET:NAME. references: labeled images
    that are shown to the suite first."""

    name: str
    images: tuple[RunImage, ...]
    conditions: tuple[Condition, ...]
    references: tuple[RunImage, ...] = ()


@dataclass(frozen=True)
class Trial:
    """What a dry run times in place of a condition that takes long. times: how many times as long the
    condition itself takes; note: what the estimate assumes."""

    condition: Condition
    times: float = 1.0
    note: str = ""


class Suite(SuiteResults):
    """Base of all suites; the defaults measure the model's predictions. `register_suite` shows a whole
    example.

    Attributes:
        argument: What stands after a colon, such as "NAME=FOLDER"; empty if nothing may.
        own_images: Has images of its own, so that a run of such suites needs no data.
        needs_masks: Every image of the data needs a mask.
        needs_files: Reads other images beside the data, so that the data has to be files, too.
        samples_note: Text below its sample images in a report.
        outputs: What models it measures give; most suites measure the accuracy of classes.
        label_maps: Is measured on a segmenter with label maps, so it is never run together with other suites.
    """

    summary: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    options: ClassVar[tuple[Option, ...]] = ()
    own_images: ClassVar[bool] = False
    needs_masks: ClassVar[bool] = False
    needs_files: ClassVar[bool] = False
    label_maps: ClassVar[bool] = False
    samples_note: ClassVar[str] = ""
    outputs: ClassVar[tuple[Outputs, ...]] = ("classes",)

    def __init__(self, arguments: Sequence[str] = (), **options: Any) -> None:
        """arguments: what stood after the colon, once for each time the suite was named; options: checked
        values."""
        self.arguments = tuple(arguments)
        self.values = {option.name: options.get(option.name, option.default) for option in self.options}
        self.notes: list[str] = []

    def check(self) -> None:
        """Raise InputError if the arguments are not what the suite expects; called before a run."""
        if self.arguments:
            raise InputError(f"{self.name} takes nothing after a colon, got {self.name}:{self.arguments[0]}")

    def open(self, limit: int | None) -> None:
        """Read what the suite needs beside the data; before the model is loaded. limit: images of each set at
        most."""

    def use_data(self, images: Sequence[Item] | None) -> None:
        """Take in the list of the images of the data, for suites that combine images; None for a stream."""

    def conditions(self, evaluator: Evaluator) -> Iterable[Condition]:
        """What is done to every image of the data; raises if the model is not suitable; `self.notes`
        lists what is left out."""
        return ()

    def image_sets(self, evaluator: Evaluator) -> Iterable[ImageSet]:
        """Images of the suite's own."""
        return ()

    def facts(self) -> dict[str, Any]:
        """What defines its numbers, for run.json: a run resumes only with the same facts. Default: its
        options."""
        return dict(self.values)

    def make(self, image: ImageView, condition: Condition) -> Views:
        """The views that the condition makes of one image; default: the image as the model sees it."""
        return image.pixels()[None]

    def reference(self, evaluator: Evaluator, image_set: str, batch: Batch) -> None:
        """Take in a batch of the references of an image set."""

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """What the rows of the condition hold; default: the model's predictions, view v under setting v."""
        logits = evaluator.logits(batch.views.flatten(0, 1)).unflatten(0, batch.views.shape[:2])
        return [
            measurement
            for view, setting in enumerate(condition.settings)
            for measurement in evaluator.classify(setting, logits[:, view], batch.correct)
        ]

    def trial(self, evaluator: Evaluator, condition: Condition) -> Trial:
        """What a dry run measures to estimate the cost of a condition; default: the condition."""
        return Trial(condition)

    def samples(self, evaluator: Evaluator, image: ImageView) -> Iterator[SampleImage]:
        """An image of the data under the suite's conditions, for reports; stored with the run."""
        return iter(())


def check_outputs(suites: Iterable[Suite], outputs: Outputs) -> None:
    """An error in words if a suite cannot measure a model with these outputs."""
    from steadygaze.target import task_of_outputs

    for suite in suites:
        if outputs not in suite.outputs:
            able = [one.name for one in SUITES.values() if outputs in one.outputs]
            raise InputError(
                f"{suite.name} measures {' or '.join(suite.outputs)}, but this model gives {outputs} "
                f"(task {task_of_outputs(outputs)}). Use {', '.join(able)}, or `verify`.",
                option="suites",
            )


@dataclass(frozen=True)
class SuiteInfo:
    """The public description of a suite, as `list_suites` gives it. options: name -> help."""

    name: str
    summary: str
    argument: str = ""
    own_images: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


SUITES: Registry[type[Suite]] = Registry(
    "suite",
    built_in=[  # in the order of runs and tables
        f"steadygaze.runs.suites.{file}"
        for file in (
            "corruptions",
            "sequences",
            "attacks",
            "autoattack",
            "patchfool",
            "occlusion",
            "attention",
            "shift",
            "cue_conflict",
            "synthetic",
            "backgrounds",
            "ood",
            "neighbors",
            "segmentation",
            "vqa",
        )
    ],
    hint="Suites that take an argument are written SUITE:ARGUMENT.",
)
Registered = TypeVar("Registered", bound=type[Suite])


def register_suite(name: str, *, replace: bool = False) -> Callable[[Registered], Registered]:
    """Class decorator that makes a suite available to `stress` under `name`.

    On the command line: `steadygaze stress --suites mirror --axes x,y`. It resumes after a kill, and its
    accuracy appears in tables and reports. A suite that measures something else overrides `measure`;
    `scores`, `tables` and `figures` add what follows from the rows.

    Args:
        name: Name of the suite, which becomes the class's attribute `name`.
        replace: Replace a suite that has this name, instead of raising `InputError`.

    Returns:
        The decorator of a subclass of `steadygaze.runs.suite.Suite`.

    Examples:
        import numpy as np
        import steadygaze as sg
        from steadygaze.runs.settings import Condition, Setting
        from steadygaze.runs.suite import Option, Suite

        @sg.register_suite("mirror")
        class Mirror(Suite):
            title = "Mirrored images"
            summary = "Images flipped from left to right, or upside down."
            options = (Option("axes", lambda text: tuple(str(text).split(",")), ("x",), "x, y or x,y"),)

            def conditions(self, evaluator):
                for axis in self.values["axes"]:
                    yield Condition(self.name, (Setting(self.name, "mirror", axis),), evaluator.predictions)

            def make(self, image, condition):
                flipped = np.flip(image.pixels(), axis=1 if condition.setting.level == "x" else 0)
                return flipped[None]

        rows = sg.stress(model, "photos/", suites=["mirror"], axes="x,y")
    """

    def decorate(suite: Registered) -> Registered:
        suite.name = name
        SUITES.add(name, suite, origin=suite.__module__, replace=replace)
        return suite

    return decorate


def list_suites() -> Listing[SuiteInfo]:
    """Every suite that `stress` knows; a list that shows itself as a table."""
    described = {name: about.help for name, about in SUITE_OPTIONS.items()}
    infos = [
        SuiteInfo(
            suite.name,
            suite.summary,
            suite.argument,
            suite.own_images,
            {option.name: option.help or described.get(option.name, "") for option in suite.options},
        )
        for suite in SUITES.values()
    ]
    return Listing(infos, "suites", ("name", "summary", "argument"))


def all_options() -> dict[str, Option]:
    """The options of all suites, by name."""
    return {option.name: option for suite in SUITES.values() for option in suite.options}


class Predictions(Suite):
    """Clean images; runs beside every suite that is measured on a classifier."""

    name = CLEAN.suite
    title = "Accuracy by set"
    quantities = (TOP1, TOP5, CONFIDENCE, ECE, WORST_GROUP)
    tiles: ClassVar = {
        ("clean", "top1"): "accuracy on clean images",
        ("clean", "top5"): "correct class among the first five",
        ("clean", "ece"): "expected calibration error",
        ("clean", "worst_group"): "accuracy of the worst group",
    }

    def conditions(self, evaluator: Evaluator) -> Iterable[Condition]:
        if TOP5 not in evaluator.predictions:
            self.notes.append(f"top5 is left out: the model has {evaluator.classes} classes")
        yield Condition(self.name, (CLEAN,), evaluator.predictions, unchanged=True)

    def numbers(self, card: Card, population: str) -> Iterator[Score]:
        """The expected calibration error of every setting with predictions."""
        measured = []
        for setting in card.measured_settings(metric=TOP1.name):
            if setting.population != population or CONFIDENCE not in card.metrics_of([setting.label]):
                continue
            correct = card.values(setting.label, TOP1.name)
            confidence = card.values(setting.label, CONFIDENCE.name)
            if (~np.isnan(correct + confidence)).any():
                measured.append((setting, correct, confidence))
        samples = resampled_ece([pair for _, *pair in measured], card.repeats, card.seed)
        for (setting, correct, confidence), own in zip(measured, samples, strict=True):
            count = int((~np.isnan(correct + confidence)).sum())
            yield Score(setting, ECE, own, count, f"{BINS} bins")

    def scores(self, card: Card) -> Iterator[Score]:
        """Accuracy by group, if the data has groups."""
        return group_scores(card)

    def tables(self, card: Card) -> Iterator[Table]:
        """Clean, shifts, attacks, ...: every setting with predictions that is part of no series."""
        settings = [s for s in card.measured_settings(metric=TOP1.name) if not s.minor]
        if not settings:
            return
        has_top5 = any(name == TOP5.name for _, name in card.keys)
        metrics = [TOP1, *([TOP5] if has_top5 else []), CONFIDENCE, ECE]
        rows = [
            [
                setting.label,
                *(card.text(setting.label, metric.name) for metric in metrics),
                str(card.numbers[setting.label, TOP1.name].images),
            ]
            for setting in settings
        ]
        yield Table(
            "accuracy, confidence and ece (expected calibration error), %",
            ["setting", *(m.title for m in metrics), "images"],
            rows,
        )
        yield from group_tables(card)

    def figures(self, card: Card) -> Iterator[Figure]:
        bars = [
            bar(card.numbers[s.label, TOP1.name], s.words, 2 if s == CLEAN else 1)
            for s in card.measured_settings(metric=TOP1.name)
            if not s.minor
        ]
        if len(bars) > 1:
            caption = "top-1 accuracy; whiskers are 95 % intervals"
            yield BarChart("Accuracy by set", bars, "accuracy, %", caption, highest=100)
        yield from group_figures(card)


def resampled_ece(settings: Sequence[Sequence[np.ndarray]], repeats: int, seed: int) -> list[np.ndarray]:
    """ECE of the data and of every resampled data set, with the same draws as `bootstrap`, for each setting.

    ECE of few images is biased upwards, and that of a resampled data set, with fewer distinct images, even
    more. Resampled values are shifted by the mean of that excess (docs/equations.md#ece).

    Args:
        settings: Correct and confidence (n,) of the same images.
    """
    if not settings:
        return []
    known = [~np.isnan(correct + confidence) for correct, confidence in settings]
    samples = []
    for (correct, confidence), own in zip(settings, known, strict=True):
        gaps = _gaps(correct, confidence, own)
        samples.append([np.abs(gaps.sum(0)).sum(keepdims=True) / own.sum()])
    for counts in draws(len(known[0]), repeats, seed):
        totals = counts @ np.stack(known, 1).astype(np.float64)
        for k, (correct, confidence) in enumerate(settings):
            gaps = _gaps(correct, confidence, known[k])  # made again: those of all settings take much memory
            with np.errstate(invalid="ignore", divide="ignore"):
                samples[k].append(np.abs(counts @ gaps).sum(1) / totals[:, k])
    return [_without_excess(np.concatenate(pieces)) for pieces in samples]


def _without_excess(samples: np.ndarray) -> np.ndarray:
    """The value and its resampled values, these shifted so that their mean is the value; at least 0."""
    value, resampled = samples[:1], samples[1:]
    if not len(resampled):
        return samples
    return np.concatenate([value, np.maximum(resampled - (np.nanmean(resampled) - value), 0.0)])


def _gaps(correct: np.ndarray, confidence: np.ndarray, known: np.ndarray) -> Float[np.ndarray, "n bins"]:
    """Correct minus confidence of each image, in the column of its bin."""
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.clip(np.searchsorted(edges, np.where(known, confidence, 0)) - 1, 0, BINS - 1)
    gaps = np.zeros((len(correct), BINS))
    gaps[np.arange(len(correct)), bins] = np.where(known, correct - confidence, 0)
    return gaps


def with_predictions(suites: list[Suite], evaluator: Evaluator) -> list[Suite]:
    """The suites, and clean accuracy if the model gives classes."""
    return [Predictions(), *suites] if evaluator.outputs == "classes" else list(suites)


def all_suites() -> list[Suite]:
    """Every suite with its defaults, to read rows with."""
    return [Predictions(), *(suite() for suite in SUITES.values())]
