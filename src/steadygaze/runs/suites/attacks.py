"""Attacks: FGSM and PGD in pixel space (docs/equations.md#fgsm, docs/equations.md#pgd).

| setting | metrics |
| --- | --- |
| `fgsm/8`, `pgd/8`: epsilon in 1/255 | top1, top5, confidence |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from steadygaze.errors import InputError
from steadygaze.runs.card import Card, Key
from steadygaze.runs.settings import CLEAN, TOP1, Condition, Figure, Line, LineChart, Measurement, Setting
from steadygaze.runs.suite import Option, Suite, register_suite
from steadygaze.runs.suites.corruptions import split_words

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch

ATTACKS = ("fgsm", "pgd")
EPSILONS = (1 / 255, 2 / 255, 8 / 255)


def gray_levels(epsilon: float) -> float:
    """Epsilon in 1/255, as a setting's level: 8/255 and 0.0313725 are one."""
    return float(f"{round(255 * epsilon, 4):g}")


def parse_epsilons(given: str | float | Iterable[Any]) -> tuple[float, ...]:
    """Shares of the full scale: 8/255 or 0.031, not 8.

    Examples:
        >>> [round(255 * e) for e in parse_epsilons("8/255,1/255")]
        [1, 8]
    """
    from steadygaze.robustness.attacks import budget

    epsilons: dict[float, float] = {}
    for word in split_words(given):
        try:
            above, _, below = str(word).partition("/")
            value = float(above) / float(below or 1)
        except (ValueError, ZeroDivisionError) as error:
            raise InputError(f"epsilons: expected fractions such as 8/255, got {word!r}") from error
        epsilons.setdefault(gray_levels(budget("epsilon", value)), value)
    if not epsilons or 0 in epsilons:
        raise InputError(
            "epsilons: expected fractions of the pixel range above 0, such as 1/255,8/255; 0 is the clean "
            "image"
        )
    return tuple(sorted(epsilons.values()))


def parse_steps(given: Any) -> int:
    """A number of PGD steps."""
    steps = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"pgd_steps: expected a whole number of 1 or more, got {given!r}")
    return steps


@register_suite("attacks")
class Attacks(Suite):
    """White-box attacks on the clean images."""

    title = "Attacks"
    summary = "FGSM and PGD attacks in pixel space at several epsilons."
    options = (
        Option("epsilons", parse_epsilons, EPSILONS),
        Option("pgd_steps", parse_steps, 10),
    )
    compared = ("pgd_steps",)

    def headline(self, card: Card) -> dict[Key, str]:
        keys = super().headline(card)
        return {key: f"epsilon {card.settings[key[0]].level:g}/255" for key in keys}

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        for name in ATTACKS:
            for epsilon in self.values["epsilons"]:
                setting = Setting(self.name, name, gray_levels(epsilon))
                yield Condition(
                    self.name, (setting,), evaluator.predictions, unchanged=True, argument=epsilon
                )

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        from steadygaze.robustness.attacks import fgsm, pgd

        budgets: dict[str, Any] = {
            "epsilon": condition.argument,
            "mean": evaluator.preprocess.mean,
            "std": evaluator.preprocess.std,
        }
        if condition.setting.name == "fgsm":
            attacked = fgsm(evaluator.model, batch.first, batch.labels, **budgets)
        else:
            generators = evaluator.generators("pgd", batch.images)
            steps = self.values["pgd_steps"]
            attacked = pgd(
                evaluator.model, batch.first, batch.labels, steps=steps, generator=generators, **budgets
            )
        return evaluator.classify(condition.setting, evaluator.logits(attacked), batch.correct)

    def figures(self, card: Card) -> Iterator[Figure]:
        clean, settings = (
            card.numbers.get((CLEAN.label, TOP1.name)),
            card.measured_settings(self.name, TOP1.name),
        )
        lines = []
        for group, name in enumerate(ATTACKS):
            points = [
                (float(s.level), card.numbers[s.label, TOP1.name])
                for s in settings
                if s.name == name and isinstance(s.level, int | float)
            ]
            if not points:
                continue
            if clean is not None:
                points = [(0.0, clean), *points]
            values = [100 * number.value for _, number in points]
            limits = [(100 * number.low, 100 * number.high) for _, number in points]
            lines.append(Line(name.upper(), [x for x, _ in points], values, group, limits))
        if lines:
            yield LineChart("Attacks in pixel space", lines, "epsilon, 1/255", "accuracy, %")
