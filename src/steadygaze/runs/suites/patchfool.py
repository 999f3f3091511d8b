"""Patch-Fool: one patch of the image is replaced by an adversarial one (docs/equations.md#patch-fool).

| setting | metrics |
| --- | --- |
| `patchfool/attention`, `patchfool/random`, `patchfool/METHOD`, `patchfool/7x7` | top1: robust accuracy |
| | patch_steps: steps until the first wrong prediction |
| | patch_attention_clean, patch_attention: what the attacked patch receives, before and after |

The attack of an image ends at its first wrong prediction, so top1 is the worst over all steps. The detail of
top1 is [label, predicted class], that of the attention one number for each layer; images that are
misclassified before the attack have no steps and no attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.methods.registry import DEFAULT, parse_method, unavailable
from steadygaze.quantity import Quantity
from steadygaze.robustness.protocols import PATCH_FOOL_STEPS
from steadygaze.runs.card import Card, Key
from steadygaze.runs.settings import (
    CLEAN,
    TOP1,
    BarChart,
    Condition,
    Figure,
    Line,
    LineChart,
    Measurement,
    Setting,
    Table,
    bar,
)
from steadygaze.runs.suite import Option, Suite, Trial, register_suite
from steadygaze.runs.suites.autoattack import parse_count
from steadygaze.seeding import image_seed

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch

PLACES = ("attention", DEFAULT, "random")
TIMED = 5  # steps that a dry run times
SURVIVED = Quantity(
    "patch_steps", "steps", "higher", 0, digits=1, summary="steps until the first wrong prediction"
)
BEFORE, AFTER = (
    Quantity(
        name,
        better="neither",
        digits=2,
        summary=f"attention to the attacked patch {when} the attack; 1: as to the average token",
    )
    for name, when in (("patch_attention_clean", "before"), ("patch_attention", "after"))
)


def parse_place(given: str) -> str | tuple[int, int]:
    """attention, random, an attribution method, or row and column.

    Examples:
        >>> parse_place("7x3"), parse_place("gae")
        ((7, 3), 'gae')
    """
    row, cross, column = given.partition("x")
    if cross and row.isdecimal() and column.isdecimal():
        return int(row), int(column)
    if given not in ("attention", "random"):
        parse_method(given)
    return given


def _place_words(given: str) -> str:
    """Where the patch is.

    Examples:
        >>> _place_words("gae"), _place_words("7x3")
        ('most relevant patch by gae', 'row 7, column 3')
    """
    place = parse_place(given)
    if isinstance(place, tuple):
        return f"row {place[0]}, column {place[1]}"
    known = {"attention": "most attended patch", "random": "random patch"}
    return known.get(place, f"most relevant patch by {place}")


@register_suite("patchfool")
class PatchFool(Suite):
    """An adversarial patch on one token."""

    title = "Patch-Fool"
    summary = "One adversarial patch: at the most attended, the most relevant, a random or a given token."
    argument = "attention, random, METHOD or ROWxCOLUMN"
    options = (Option("patch_steps", partial(parse_count, "patch_steps"), PATCH_FOOL_STEPS, must_serve=True),)
    quantities = (SURVIVED, BEFORE, AFTER)
    compared = ("patch_steps",)

    @staticmethod
    def setting_words(setting: Setting) -> str:
        return f"{PatchFool.title}, {_place_words(str(setting.level))}"

    @property
    def places(self) -> tuple[str, ...]:
        """Where the patch is put, one after the other."""
        return self.arguments or PLACES

    def check(self) -> None:
        for place in self.places:
            parse_place(place)
        if len(set(self.places)) < len(self.places):
            raise InputError(f"patchfool: the same place is given twice: {', '.join(self.places)}")

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        vit = evaluator.vit
        if vit is None or not vit.plan.global_attention:
            kind = "not a vision transformer" if vit is None else f"a {vit.plan.kind}"
            raise MethodUnavailableError(
                f"patchfool: {evaluator.name} is {kind}, without attention over all tokens. Use attacks.",
                option="suites",
            )
        if self.values["patch_steps"] != PATCH_FOOL_STEPS:
            self.notes.append(f"not the published Patch-Fool: patch_steps {self.values['patch_steps']}")
        for text in self.places:
            place = parse_place(text)
            if isinstance(place, str) and place not in ("attention", "random"):
                if reason := unavailable(parse_method(place), vit):
                    raise MethodUnavailableError(f"patchfool:{place}: {reason}", option="suites")
            elif isinstance(place, tuple) and not (place[0] < vit.grid[0] and place[1] < vit.grid[1]):
                raise InputError(
                    f"patchfool:{text}: expected a place on the grid of {vit.grid[0]} x {vit.grid[1]} "
                    "patches, counted from 0",
                    option="suites",
                )
            setting = Setting(self.name, self.name, text)
            metrics = (TOP1, SURVIVED, BEFORE, AFTER)
            argument = (place, self.values["patch_steps"])
            yield Condition(self.name, (setting,), metrics, unchanged=True, argument=argument)

    def trial(self, evaluator: Evaluator, condition: Condition) -> Trial:
        place, steps = condition.argument
        note = (
            f"{condition.setting.label}: time of images that survive all {steps} steps; the attack of others "
            "ends earlier"
        )
        timed = min(TIMED, steps)
        return Trial(replace(condition, argument=(place, timed)), steps / timed, note)

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        from steadygaze.robustness.patch_fool import patch_fool

        assert evaluator.vit is not None
        place, steps = condition.argument
        images, labels = batch.first, batch.labels
        logits = evaluator.logits(images)
        broken = evaluator.broken_rows(logits)
        purpose = condition.setting.label
        result = patch_fool(
            evaluator.vit,
            images,
            labels,
            place=place,
            steps=steps,
            stop_early=True,
            seeds=[image_seed(evaluator.seed, f"{purpose} {image.name}") for image in batch.images],
            mean=evaluator.preprocess.mean,
            std=evaluator.preprocess.std,
        )
        predicted = np.stack([labels.cpu().numpy(), result.predicted.cpu().numpy()], 1)
        robust = result.robust().double().cpu().numpy()
        taken = result.steps.double().cpu().numpy()
        attacked = (logits.argmax(1) == labels).cpu().numpy()
        measurements = [
            Measurement(condition.setting, TOP1, robust, predicted, broken),
            Measurement(condition.setting, SURVIVED, np.where(attacked, taken, np.nan), None, broken),
        ]
        for metric, received in ((BEFORE, result.before), (AFTER, result.after)):
            layers = result.at_place(received).double().cpu().numpy()
            values = np.where(attacked, layers.mean(1), np.nan)
            measurements.append(Measurement(condition.setting, metric, values, layers, broken))
        return measurements

    def headline(self, card: Card) -> dict[Key, str]:
        settings = card.measured_settings(self.name, TOP1.name)
        return {(s.label, TOP1.name): "robust accuracy" for s in settings}

    def tables(self, card: Card) -> Iterator[Table]:
        rows = [
            [str(s.level), *(card.text(s.label, metric.name) for metric in (TOP1, SURVIVED, BEFORE, AFTER))]
            for s in card.measured_settings(self.name, TOP1.name)
        ]
        if rows:
            columns = ["place", "top1, %", "steps", "attention before", "after"]
            yield Table("Patch-Fool: robust accuracy, and attention to the attacked patch", columns, rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        settings = card.measured_settings(self.name, TOP1.name)
        numbers = [(card.numbers.get((s.label, TOP1.name)), s) for s in [CLEAN, *settings]]
        bars = [
            bar(number, "clean" if s == CLEAN else _place_words(str(s.level)), 2 if s == CLEAN else 1)
            for number, s in numbers
            if number is not None
        ]
        if settings:
            caption = "one adversarial patch, at different places; whiskers are 95 % intervals"
            yield BarChart("Patch-Fool", bars, "robust accuracy, %", caption, highest=100)
        for s in settings:
            lines = []
            for group, (metric, name) in enumerate(((AFTER, "after"), (BEFORE, "before"))):
                layers = _by_layer(card, s.label, metric.name)
                if len(layers):
                    mean, half = layers.mean(0), 1.96 * layers.std(0) / len(layers) ** 0.5
                    limits = list(zip((mean - half).tolist(), (mean + half).tolist(), strict=True))
                    lines.append(Line(name, list(range(len(mean))), mean.tolist(), group, limits))
            if lines:
                yield LineChart(
                    f"Attention to the attacked patch, at {s.level}",
                    lines,
                    "layer (0: the first)",
                    "attention, 1: as to the average token",
                    "mean over heads, queries, and images that are classified correctly without the attack",
                    integers=True,
                )


def _by_layer(card: Card, label: str, metric: str) -> Float[np.ndarray, "images layers"]:
    """The details of the images that have a value: not of those misclassified before the attack."""
    if (label, metric) not in card.keys:
        return np.empty((0, 0))
    details = card.details(label, metric)
    whole = details.lengths > 0
    attacked = ~np.isnan(card.values(label, metric)[details.ranks[whole]])
    return details.numbers.reshape(len(attacked), -1)[attacked] if len(attacked) else np.empty((0, 0))
