"""Corruptions: 15 (or 19) corruptions at severities 1 to 5, after ImageNet-C
(docs/equations.md#corruption-error).

| setting | metrics |
| --- | --- |
| `fog/3`, ... | top1, top5, confidence |

| score | setting | what |
| --- | --- | --- |
| error, ce | `fog` | mean top-1 error over severities; the same in percent of AlexNet's |
| mean_error, mce, relative_mce | `corruptions` | over the 15 common ones; `mean_error_all`: over all |

mCE and its relatives compare with AlexNet's errors on ImageNet, so they are given for models of 1,000 classes
alone, and only if all 15 corruptions were run at all 5 severities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS, SEVERITIES
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.quantity import Quantity
from steadygaze.robustness.scores import ALEXNET, ALEXNET_CLEAN
from steadygaze.runs.card import Card, Change
from steadygaze.runs.settings import (
    CLEAN,
    CONFIDENCE,
    ECE,
    FADED,
    TOP1,
    Bar,
    BarChart,
    Condition,
    Figure,
    Line,
    LineChart,
    SampleImage,
    Score,
    Setting,
    Table,
    Views,
    bar,
    share,
)
from steadygaze.runs.suite import Option, Suite, register_suite

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import ImageView

SETS = {"all15": COMMON, "all19": CORRUPTIONS}
FAMILIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    "weather": ("snow", "frost", "fog", "brightness", "spatter"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
}
FAMILY = {name: index for index, names in enumerate(FAMILIES.values()) for name in names}

ERROR = share("error", better="lower")
MEAN_ERROR = share("mean_error", better="lower")
MEAN_ERROR_ALL = share("mean_error_all", better="lower")
CE = Quantity("ce", better="lower", label="CE", digits=1)
MCE = Quantity("mce", better="lower", label="mCE", digits=1)
RELATIVE_MCE = Quantity("relative_mce", better="lower", label="relative mCE", digits=1)


def parse_corruptions(given: str | Sequence[str]) -> tuple[str, ...]:
    """all15, all19, or names; in the order of the paper."""
    texts = [given] if isinstance(given, str) else given
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    chosen = {name for word in words for name in SETS.get(word, (word,))}
    for name in sorted(chosen):
        if name not in CORRUPTIONS:
            raise UnknownNameError("corruption", name, (*CORRUPTIONS, *SETS), option="corruptions")
    if not chosen:
        raise InputError("corruptions: expected all15, all19 or names, got none")
    return tuple(name for name in CORRUPTIONS if name in chosen)


def parse_severities(given: str | int | Iterable[Any]) -> tuple[int, ...]:
    """Integers from 1 to 5, in ascending order."""
    severities = set()
    for word in split_words(given):
        if isinstance(word, bool) or str(word) not in map(str, SEVERITIES):
            raise InputError(
                f"expected severities of 1, 2, 3, 4 or 5, got {word!r}; 0 is the clean image, which is "
                "always measured"
            )
        severities.add(int(word))
    if not severities:
        raise InputError("severities: expected at least one of 1 to 5, got none")
    return tuple(sorted(severities))


def split_words(given: str | float | Iterable[Any]) -> list[Any]:
    """What stands between commas, one number, or the numbers of a list."""
    if isinstance(given, str):
        return [word.strip() for word in given.split(",") if word.strip()]
    return [given] if isinstance(given, int | float) else list(given)


CORRUPTION_OPTIONS = (
    Option("corruptions", parse_corruptions, COMMON),
    Option("severities", parse_severities, SEVERITIES),
)


def corruption_setting(name: str, severity: int) -> Setting:
    """The setting of a corruption at a severity, the same in every suite that uses it."""
    return Setting(Corruptions.name, name, severity, minor=True)


def corrupted(image: ImageView, setting: Setting) -> np.ndarray:
    """The image (H, W, 3) under a setting of a corruption."""
    from steadygaze.robustness.corruptions.corrupt import corrupt

    assert isinstance(setting.level, int)
    return corrupt(image.pixels(), setting.name, setting.level, seed=image.seed)


def middle_severity(suite: Suite) -> int:
    """The middle one of a suite's severities, 3 of 1..5."""
    severities: tuple[int, ...] = suite.values["severities"]
    return severities[len(severities) // 2]


def sample_settings(suite: Suite) -> list[Setting]:
    """Each corruption of a suite at its middle severity."""
    return [corruption_setting(name, middle_severity(suite)) for name in suite.values["corruptions"]]


@register_suite("corruptions")
class Corruptions(Suite):
    """Corruptions of the data, made in memory."""

    title = "Corruptions"
    summary = "15 or 19 image corruptions (noise, blur, weather, digital) at severities 1 to 5."
    options = CORRUPTION_OPTIONS
    quantities = (ERROR, CE, MEAN_ERROR, MEAN_ERROR_ALL, MCE, RELATIVE_MCE)
    tiles: ClassVar = {
        ("corruptions", "mean_error"): "mean corruption error",
        ("corruptions", "mce"): "mCE",
        ("corruptions", "relative_mce"): "relative mCE",
        ("corruptions", "mean_error_all"): "mean error, extra corruptions too",
    }

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        for name in self.values["corruptions"]:
            for severity in self.values["severities"]:
                setting = corruption_setting(name, severity)
                yield Condition(self.name, (setting,), evaluator.predictions)

    def make(self, image: ImageView, condition: Condition) -> Views:
        return corrupted(image, condition.setting)[None]

    def samples(self, evaluator: Evaluator, image: ImageView) -> Iterator[SampleImage]:
        yield SampleImage("clean", Image.fromarray(image.pixels()))
        for setting in sample_settings(self):
            yield SampleImage(setting.words, Image.fromarray(corrupted(image, setting)))

    def scores(self, card: Card) -> Iterator[Score]:
        yield from corruption_scores(card, self.name, "", "made in memory, no JPEG")

    def tables(self, card: Card) -> Iterator[Table]:
        yield from corruption_tables(card, self.name, "")

    def figures(self, card: Card) -> Iterator[Figure]:
        yield from corruption_figures(card, self.name, "", "")

    def change_figures(self, changes: Sequence[Change]) -> Iterator[Figure]:
        """The error by corruption of both models, one bar below the other."""
        bars = []
        for change in changes:
            if change.quantity == ERROR and change.setting.suite == self.name:
                sides = ((f"{change.setting.words}, before", change.before, 1), ("after", change.after, 0))
                for words, spread, group in sides:
                    bars.append(Bar(words, 100 * spread.mean, 100 * spread.low, 100 * spread.high, group))
        if bars:
            caption = "whiskers, if any: from the lowest to the highest seed"
            x_label = "top-1 error, mean over severities, %"
            yield BarChart("Error by corruption", bars, x_label, caption, highest=100)


def by_corruption(card: Card, suite: str, source: str, quantity: Quantity) -> dict[str, dict[int, Setting]]:
    """corruption -> severity -> setting, of those that were measured, in the order of the paper."""
    settings: dict[str, dict[int, Setting]] = {}
    everything = card.measured_settings(suite, quantity.name, source)
    measured = [setting for setting in everything if setting.name in CORRUPTIONS]
    for setting in sorted(measured, key=lambda s: (CORRUPTIONS.index(s.name), s.level)):
        if isinstance(setting.level, int):
            settings.setdefault(setting.name, {})[setting.level] = setting
    return settings


def _score_setting(suite: str, source: str, name: str) -> Setting:
    """The setting of a score over severities, or over corruptions; short tables show it."""
    return Setting(suite, name, source=source, label=f"{source}/{name}" if source else name)


def corruption_scores(card: Card, suite: str, source: str, origin: str) -> Iterator[Score]:
    """Errors by corruption and their means. source: a set of published images; origin: part of the notes."""
    settings = by_corruption(card, suite, source, TOP1)
    if not settings:
        return
    errors: dict[str, dict[int, np.ndarray]] = {}
    images = 0
    for name, by_severity in settings.items():
        numbers = {severity: card.measured[s.label, TOP1.name] for severity, s in by_severity.items()}
        errors[name] = {severity: 1 - number.samples for severity, number in numbers.items()}
        images = max(images, *(number.images for number in numbers.values()))
    imagenet = card.run["settings"].get("classes") == 1000
    for name, levels in errors.items():
        setting = _score_setting(suite, source, name)
        mean = np.mean(list(levels.values()), axis=0)
        yield Score(setting, ERROR, mean, images, f"severities {', '.join(map(str, levels))}")
        if imagenet and len(levels) == len(SEVERITIES) and name in ALEXNET:
            yield Score(setting, CE, 100 * _total(levels) / sum(ALEXNET[name]), images, "AlexNet is 100")
    whole_set = Setting(suite, source or suite, source=source)
    common = [name for name in errors if name in COMMON]
    if common:
        mean = np.mean([error for name in common for error in errors[name].values()], axis=0)
        severities = _severity_text(errors, common)
        note = f"{len(common)} of the 15 common corruptions, {severities}; {origin}; {images} images"
        yield Score(whole_set, MEAN_ERROR, mean, images, note, headline=True)
    if len(common) < len(errors):
        mean = np.mean([error for levels in errors.values() for error in levels.values()], axis=0)
        note = f"{len(errors)} corruptions, the extra ones too; {origin}; {images} images"
        yield Score(whole_set, MEAN_ERROR_ALL, mean, images, note, headline=True)
    complete = all(len(errors[name]) == len(SEVERITIES) for name in common)
    if not (imagenet and complete and len(common) == len(COMMON)):
        return
    note = f"the 15 common corruptions at 5 severities, AlexNet is 100; {origin}; {images} images"
    relative_errors = [_total(errors[name]) / sum(ALEXNET[name]) for name in COMMON]
    yield Score(whole_set, MCE, 100 * np.mean(relative_errors, axis=0), images, note, headline=True)
    clean = card.samples(CLEAN.label, TOP1)
    if clean is not None:
        increases = [
            (_total(errors[name]) - 5 * (1 - clean)) / (sum(ALEXNET[name]) - 5 * ALEXNET_CLEAN)
            for name in COMMON
        ]
        yield Score(whole_set, RELATIVE_MCE, 100 * np.mean(increases, axis=0), images, note, headline=True)


def _severity_text(errors: dict[str, dict[int, np.ndarray]], names: list[str]) -> str:
    levels = sorted({severity for name in names for severity in errors[name]})
    return f"severities {', '.join(map(str, levels))}" if len(levels) < 5 else "severities 1 to 5"


def _total(levels: dict[int, np.ndarray]) -> np.ndarray:
    return np.sum(list(levels.values()), axis=0)


def severities_of(settings: dict[str, dict[int, Setting]]) -> list[int]:
    """The severities that any corruption was measured at."""
    return sorted({severity for levels in settings.values() for severity in levels})


def corruption_tables(card: Card, suite: str, source: str) -> Iterator[Table]:
    settings = by_corruption(card, suite, source, TOP1)
    if not settings:
        return
    severities = severities_of(settings)
    score_labels = {name: _score_setting(suite, source, name).label for name in settings}
    has_ce = any((label, CE.name) in card.scores for label in score_labels.values())
    scores = [ERROR, CE] if has_ce else [ERROR]
    rows = []
    for name, levels in settings.items():
        cells = [
            card.text(levels[s].label, TOP1.name, spread=False) if s in levels else "" for s in severities
        ]
        cells += [card.text(score_labels[name], score.name) for score in scores]
        for quantity in (CONFIDENCE, ECE):
            numbers = [card.numbers.get((setting.label, quantity.name)) for setting in levels.values()]
            values = [number.value for number in numbers if number]
            cells.append(f"{100 * np.mean(values):.1f}" if values else "")
        rows.append([name, *cells])
    heads = [f"top1 at {s}" for s in severities] + [
        "mean error",
        *(["CE"] if has_ce else []),
        "confidence",
        "ECE",
    ]
    yield Table(f"{source or suite}, %", ["corruption", *heads], rows)


def corruption_figures(card: Card, suite: str, source: str, words: str) -> Iterator[Figure]:
    """Bars by corruption, accuracy by severity, calibration by severity. words: what is added to the
    titles."""
    settings = by_corruption(card, suite, source, TOP1)
    if not settings:
        return
    labels = {name: _score_setting(suite, source, name).label for name in settings}
    yield error_bars(card, labels, ERROR, f"Error by corruption{words}", "top-1 error")
    yield from severity_lines(card, settings, TOP1, f"Accuracy by severity{words}", "accuracy, %")
    yield from calibration_lines(card, settings, f"Calibration by severity{words}")


def error_bars(card: Card, labels: dict[str, str], quantity: Quantity, title: str, axis: str) -> BarChart:
    """A score of each corruption, colored by family. labels: corruption -> label of its score."""
    bars = [
        bar(card.scores[label, quantity.name], name.replace("_", " "), FAMILY[name])
        for name, label in labels.items()
    ]
    caption, x_label = "whiskers are 95 % intervals", f"{axis}, mean over severities, %"
    return BarChart(title, bars, x_label, caption, highest=100, legend=tuple(FAMILIES))


def severity_lines(
    card: Card, settings: dict[str, dict[int, Setting]], quantity: Quantity, title: str, axis: str
) -> Iterator[LineChart]:
    """The mean of each family by severity, and single corruptions in gray."""
    severities, clean = severities_of(settings), card.numbers.get((CLEAN.label, quantity.name))
    single = {
        name: [100 * card.numbers[levels[s].label, quantity.name].value for s in severities]
        for name, levels in settings.items()
        if len(levels) == len(severities)
    }
    lines = []
    for index, (family, names) in enumerate(FAMILIES.items()):
        curves = [single[name] for name in names if name in single]
        if curves:
            mean = np.mean(curves, axis=0).tolist()
            start = [] if clean is None else [100 * clean.value]
            lines.append(Line(family, [0, *severities] if start else severities, [*start, *mean], index))
    if not lines or len(lines[0].x) < 2:
        return
    lines += [Line(name.replace("_", " "), severities, curve, FADED) for name, curve in single.items()]
    caption = "mean of each family, single corruptions in gray"
    yield LineChart(title, lines, "severity (0: clean)", axis, caption, integers=True)


def calibration_lines(card: Card, settings: dict[str, dict[int, Setting]], title: str) -> Iterator[LineChart]:
    """Accuracy, confidence and ECE by severity, mean over corruptions."""
    severities, lines = severities_of(settings), []
    for index, (name, quantity) in enumerate(
        {"accuracy": TOP1, "confidence": CONFIDENCE, "ECE": ECE}.items()
    ):
        means = []
        for severity in severities:
            labels = [levels[severity].label for levels in settings.values() if severity in levels]
            numbers = [card.numbers.get((label, quantity.name)) for label in labels]
            values = [number.value for number in numbers if number]
            means.append(100 * float(np.mean(values)) if values else float("nan"))
        clean = card.numbers.get((CLEAN.label, quantity.name))
        if clean is None:
            lines.append(Line(name, severities, means, index))
        else:
            lines.append(Line(name, [0, *severities], [100 * clean.value, *means], index))
    if len(lines[0].x) > 1:
        yield LineChart(title, lines, "severity (0: clean)", "%", "mean over corruptions", integers=True)
