"""Figures and tables as data: a suite declares them, `report` draws them and the command line prints them.

Under what an image is measured: a typed value instead of a string that has to be taken apart again.

What every classifier's run measures, and the numbers that follow from it.

The protocol of a suite, and the registry of all suites. Nothing outside `suites/` knows a suite by name.

A suite owns everything about its subject: its conditions, how an image is made under a condition, what is
measured, the scores of the field that follow from the measurements, and its figures and tables. A run asks it
in this order:

| method | when | where |
| --- | --- | --- |
| `open` | before the model is loaded: read folders, check names | main process |
| `conditions`, `image_sets` | once the model is known | main process |
| `make` | for each image and condition | worker processes |
| `reference`, `measure` | for each batch | beside the model |
| `samples` | once, for reports | beside the model |
| `numbers`, `scores`, `tables`, `figures` | when a run is read | report, command line |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from steadygaze.errors import InputError
from steadygaze.notebook import Listing
from steadygaze.quantity import Better, Quantity
from steadygaze.registry import Registry
from steadygaze.robustness.by_class import wilson
from steadygaze.runs.statistics import interval
from steadygaze.target import Outputs, task_of_outputs

if TYPE_CHECKING:
    from steadygaze.runs.card import Card
    from steadygaze.runs.compare import Change
    from steadygaze.runs.evaluator import Batch, Evaluator, Measurement
    from steadygaze.runs.source import ImageView, RunImage

FADED = 8  # groups from here on are thin and gray, without a name in the legend


@dataclass(frozen=True)
class Bar:
    """A value with its 95 % interval, as it is shown (in percent, where it is a share); bars of a group share
    a color."""

    label: str
    value: float
    low: float
    high: float
    group: int = 0


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars. legend: the names of the groups."""

    title: str
    bars: Sequence[Bar]
    x_label: str
    caption: str = ""
    highest: float | None = None
    legend: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """One line, or one point, of a chart. limits, x_limits: (low, high) at each point, drawn as whiskers."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    group: int = 0
    limits: Sequence[tuple[float, float]] | None = None
    x_limits: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True)
class LineChart:
    """Lines over one axis. integers: the x axis counts something."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    caption: str = ""
    integers: bool = False


@dataclass(frozen=True)
class Heatmap:
    """A small grid of percentages, rows from top to bottom; NaN where there is none."""

    title: str
    values: Sequence[Sequence[float]]
    x_label: str
    y_label: str
    caption: str = ""


Figure = BarChart | LineChart | Heatmap


@dataclass(frozen=True)
class Table:
    """A table of text. The first column is aligned to the left, the others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


Level = float | str | tuple[float, ...] | None


@dataclass(frozen=True)
class Setting:
    """One setting of a stress run.

    suite: the suite that defines it
    name: what is done, such as "fog"
    level: how much of it, such as the severity 3; None where there is nothing to choose
    source: the name of the image set, for suites with images of their own; empty for the data of the run
    label: the value of "setting" in rows; default: name, or name/level
    minor: one of a series that a score summarizes, such as one severity; short tables leave it out

    >>> Setting("corruptions", "fog", 3).label
    'fog/3'
    """

    suite: str
    name: str
    level: Level = None
    source: str = ""
    label: str = ""
    minor: bool = False

    def __post_init__(self) -> None:
        if not self.label:
            text = self.name if self.level is None else f"{self.name}/{level_text(self.level)}"
            object.__setattr__(self, "label", text)

    @property
    def population(self) -> str:
        """Which images it is measured on: empty for the data of the run, otherwise this setting's own
        images."""
        return self.label if self.source else ""

    @property
    def words(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    def record(self) -> dict[str, Any]:
        """As written to run.json."""
        return {
            "suite": self.suite,
            "name": self.name,
            "level": list(self.level) if isinstance(self.level, tuple) else self.level,
            "source": self.source,
            "label": self.label,
            "minor": self.minor,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Setting:
        level = record["level"]
        fields = {**record, "level": tuple(level) if isinstance(level, list) else level}
        return cls(**fields)


def level_text(level: Level) -> str:
    """A level as labels write it.

    >>> level_text(0.05), level_text((0.1, 0.9)), level_text("removed")
    ('0.05', '0.1,0.9', 'removed')
    """
    if isinstance(level, tuple):
        return ",".join(f"{value:g}" for value in level)
    return level if isinstance(level, str) else f"{level:g}"


CLEAN = Setting("clean", "clean")


@dataclass(frozen=True)
class Accuracy(Quantity):
    """A share of correct predictions: each image is 0 or 1, so that its interval is Wilson's, and McNemar's
    test compares two models."""


def share(name: str, label: str = "", better: Better = "higher", summary: str = "") -> Quantity:
    """A share in 0..1, shown in percent."""
    return Quantity(name, "%", better, 0, 1, label=label, scale=100, summary=summary)


def accuracy(name: str, label: str = "") -> Accuracy:
    """A share of correct predictions, shown in percent."""
    return Accuracy(name, "%", "higher", 0, 1, label=label, scale=100)


TOP1 = accuracy("top1", "top-1")
TOP5 = accuracy("top5", "top-5")
CONFIDENCE = share("confidence", better="neither", summary="probability of the predicted class")
ECE = share("ece", "ECE", "lower", "expected calibration error")


def restricted(k: int, classes: int) -> Accuracy:
    """Accuracy among the official classes of a data set."""
    return accuracy(f"top{k}_of_{classes}", f"top-{k} of {classes}")


def quantity_record(quantity: Quantity) -> dict[str, Any]:
    """As written to run.json."""
    return {
        "name": quantity.name,
        "unit": quantity.unit,
        "better": quantity.better,
        "label": quantity.label,
        "scale": quantity.scale,
        "digits": quantity.digits,
        "accuracy": isinstance(quantity, Accuracy),
    }


def quantity_of_record(record: Mapping[str, Any]) -> Quantity:
    """The quantity that run.json describes."""
    fields = {name: value for name, value in record.items() if name != "accuracy"}
    return Accuracy(**fields) if record["accuracy"] else Quantity(**fields)


Views = UInt8[np.ndarray, "v h w 3"]


@dataclass(frozen=True)
class Option:
    """An option of a suite, accepted by `sg.stress(..., NAME=VALUE)` and by `steadygaze stress --NAME VALUE`.

    parse: from what the user gave (on the command line always text) to the checked value; raises InputError
    default: the checked value that holds if the option is not given
    must_serve: whether giving it is an error unless a requested suite has this option
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any
    help: str = ""
    must_serve: bool = False


@dataclass(frozen=True)
class Condition:
    """One thing that is done to images, and the rows that come of it: every setting with every metric.

    suite: the suite that makes the images and measures them
    views: number of images made of one
    unchanged: the model is shown the image as it is, so images in memory need no round trip through 8 bits
    single: one image at a time, for views that differ in number
    argument: anything else that the suite needs to know
    """

    suite: str
    settings: tuple[Setting, ...]
    metrics: tuple[Quantity, ...]
    views: int = 1
    unchanged: bool = False
    single: bool = False
    argument: Any = None

    @property
    def setting(self) -> Setting:
        """The first setting; most conditions have just one."""
        return self.settings[0]

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """(setting, metric) of every row of one image."""
        return tuple((setting.label, metric.name) for setting in self.settings for metric in self.metrics)


@dataclass(frozen=True)
class ImageSet:
    """Images of a suite's own, with their conditions; their names are SET:NAME. references: labeled images
    that are shown to the suite first."""

    name: str
    images: tuple[RunImage, ...]
    conditions: tuple[Condition, ...]
    references: tuple[RunImage, ...] = ()


@dataclass(frozen=True)
class SampleImage:
    """An image that a report shows. wide: a sheet of several images, shown below the others with its title as
    text."""

    title: str
    image: Image.Image
    wide: bool = False


@dataclass(frozen=True)
class Score:
    """A number of the whole data set that follows from measurements.

    samples: its value on the data set, then on every resampled data set, in the order of `Card.draws`
    headline: whether the command line prints it on a line of its own
    shares: of a share of images, the 0 or 1 of each: its interval is then Wilson's
    """

    setting: Setting
    quantity: Quantity
    samples: np.ndarray
    images: int
    note: str = ""
    headline: bool = False
    shares: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Number:
    """A number of the card with its 95 % interval.

    samples: its value, then that of every resampled data set
    proportion: a share of images, whose interval is Wilson's; otherwise it is the bootstrap's
    """

    setting: Setting
    quantity: Quantity
    value: float
    low: float
    high: float
    images: int
    note: str
    samples: np.ndarray
    headline: bool = False
    proportion: bool = False

    def text(self, *, spread: bool = True) -> str:
        """For people: in the unit of the quantity, with its interval."""
        if np.isnan(self.value):
            return "no number"
        return f"{self.quantity.text(self.value)} {self.spread_text if spread else ''}".rstrip()

    @property
    def has_interval(self) -> bool:
        """False where all images have the same value: the bootstrap then has no width, whatever the truth."""
        return self.proportion or self.low != self.high

    @property
    def spread_text(self) -> str:
        """The interval for people: (low–high) of a proportion, ± half of a bootstrap interval, or empty."""
        text = self.quantity.text
        if self.proportion:
            return f"({text(self.low)}–{text(self.high)})"
        return f"±{text((self.high - self.low) / 2)}" if self.has_interval else ""

    @classmethod
    def of(cls, score: Score) -> Number:
        samples = score.samples
        low, high = interval(samples[1:]) if len(samples) > 1 else (samples[0], samples[0])
        limits = float(samples[0]), float(low), float(high)
        number = cls(
            score.setting, score.quantity, *limits, score.images, score.note, samples, score.headline
        )
        return number if score.shares is None else with_wilson(number, score.shares)


def with_wilson(number: Number, values: np.ndarray) -> Number:
    """The number with Wilson's interval if it is a share of images."""
    known = values[~np.isnan(values)]
    if not isinstance(number.quantity, Accuracy) or not len(known) or not np.isin(known, (0, 1)).all():
        return number
    share = wilson(int(known.sum()), len(known))
    return replace(number, low=share.low, high=share.high, proportion=True)


class Suite:
    """Base of all suites; the defaults measure the model's predictions. `register_suite` shows a whole
    example.

    name: its name in `suites=` and on the command line         title: heading of its section in a report
    argument: what stands after a colon, such as "NAME=FOLDER"; empty if nothing may
    own_images: has images of its own, so that a run of such suites needs no data
    needs_masks: every image of the data needs a mask
    samples_note: text below its sample images in a report
    outputs: what models it measures give; most suites measure the accuracy of classes
    label_maps: is measured on a segmenter with label maps, so it is never run together with other suites
    quantities: the metrics and scores it knows by name
    tiles: (setting label, metric name) -> words; numbers that stand large at the top of a report
    compared: facts that must be equal in two runs that are compared
    uneven_details: metrics whose details differ in length from image to image, and so are no curves
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    options: ClassVar[tuple[Option, ...]] = ()
    own_images: ClassVar[bool] = False
    needs_masks: ClassVar[bool] = False
    label_maps: ClassVar[bool] = False
    samples_note: ClassVar[str] = ""
    outputs: ClassVar[tuple[Outputs, ...]] = ("classes",)
    quantities: ClassVar[tuple[Quantity, ...]] = ()
    tiles: ClassVar[Mapping[tuple[str, str], str]] = MappingProxyType({})
    compared: ClassVar[tuple[str, ...]] = ()
    uneven_details: ClassVar[frozenset[str]] = frozenset()

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

    def samples(self, evaluator: Evaluator, image: ImageView) -> Iterator[SampleImage]:
        """An image of the data under the suite's conditions, for reports; stored with the run."""
        return iter(())

    def numbers(self, card: Card, population: str) -> Iterator[Score]:
        """Numbers of single settings that are no mean over images."""
        return iter(())

    def scores(self, card: Card) -> Iterator[Score]:
        """The scores of the field."""
        return iter(())

    def tables(self, card: Card) -> Iterator[Table]:
        """Tables for the command line."""
        return iter(())

    def figures(self, card: Card) -> Iterator[Figure]:
        """Figures of the suite's section in a report."""
        return iter(())

    def change_figures(self, changes: Sequence[Change]) -> Iterator[Figure]:
        """Figures of a comparison of two models."""
        return iter(())


def check_outputs(suites: Iterable[Suite], outputs: Outputs) -> None:
    """An error in words if a suite cannot measure a model with these outputs."""
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
            "occlusion",
            "attention",
            "shift",
            "cue_conflict",
            "synthetic",
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

    On the command line: `steadygaze stress --suite mirror --axes x,y`. It resumes after a kill, and its
    accuracy appears in tables and reports. A suite that measures something else overrides `measure`;
    `scores`, `tables` and `figures` add what follows from the rows.

    Args:
        name: Name of the suite, which becomes the class's attribute `name`.
        replace: Replace a suite that has this name, instead of raising `InputError`.

    Returns:
        The decorator of a subclass of `steadygaze.runs.suite.Suite`.

    Example:
        import numpy as np
        import steadygaze as sg
        from steadygaze.runs.suite import Condition, Option, Setting, Suite

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
    infos = [
        SuiteInfo(
            suite.name,
            suite.summary,
            suite.argument,
            suite.own_images,
            {option.name: option.help for option in suite.options},
        )
        for suite in SUITES.values()
    ]
    return Listing(infos, "suites", ("name", "summary", "argument"))


def all_options() -> dict[str, Option]:
    """The options of all suites, by name."""
    return {option.name: option for suite in SUITES.values() for option in suite.options}
