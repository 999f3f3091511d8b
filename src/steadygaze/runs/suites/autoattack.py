"""AutoAttack: robust accuracy by the protocol of RobustBench (docs/equations.md#autoattack).

| setting | metrics |
| --- | --- |
| `after_apgd-ce_linf/8`, `after_apgd-t_linf/8`, `after_fab-t_linf/8` | top1 after these attacks |
| `autoattack_linf/8`: epsilon in 1/255; `autoattack_l2/0.5` | top1 after all four: robust accuracy |

The detail of a row is [label, predicted class].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import InputError
from steadygaze.robustness.protocols import ATTACKS, PRESETS, QUERIES, STEPS, TARGETS, Norm
from steadygaze.runs.card import Card
from steadygaze.runs.settings import (
    CLEAN,
    TOP1,
    BarChart,
    Condition,
    Figure,
    Measurement,
    Setting,
    Table,
    bar,
)
from steadygaze.runs.suite import Option, Suite, Trial, register_suite
from steadygaze.runs.suites.attacks import gray_levels
from steadygaze.seeding import image_seed

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch

TIMED = 3  # steps of PGD that a dry run times


def parse_threat(given: str) -> tuple[Norm, float]:
    """The norm and radius of a preset, or of text such as linf=8/255 and l2=0.5.

    Examples:
        >>> parse_threat("robustbench-cifar10-l2"), parse_threat("linf=51/255")
        (('l2', 0.5), ('linf', 0.2))
    """
    from steadygaze.robustness.attacks import budget

    if given in PRESETS:
        return PRESETS[given]
    norm, _, radius = given.partition("=")
    try:
        above, _, below = radius.partition("/")
        epsilon = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        epsilon = float("nan")
    if norm not in ("linf", "l2") or not 0 < epsilon < float("inf"):
        raise InputError(
            f"autoattack: expected one of {', '.join(PRESETS)}, or a norm and a radius such as linf=8/255 or "
            f"l2=0.5, got {given!r}",
            option="suites",
        )
    return ("linf", budget("epsilon", epsilon)) if norm == "linf" else ("l2", epsilon)


def parse_count(name: str, given: Any) -> int:
    """A number of steps or queries."""
    count = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"{name}: expected a whole number of 1 or more, got {given!r}")
    return count


@register_suite("autoattack")
class AutoAttackSuite(Suite):
    """Four attacks, each on the images that survived those before it."""

    title = "AutoAttack"
    summary = "Robust accuracy by AutoAttack: APGD-CE, APGD-T, FAB-T and Square, L∞ or L2."
    argument = "PRESET, linf=EPSILON or l2=EPSILON"
    options = (
        Option("attack_steps", partial(parse_count, "attack_steps"), STEPS, must_serve=True),
        Option("square_queries", partial(parse_count, "square_queries"), QUERIES, must_serve=True),
    )
    compared = ("attack_steps", "square_queries")

    def check(self) -> None:
        if not self.arguments:
            raise InputError(
                f"autoattack: expected a threat after a colon: autoattack:{next(iter(PRESETS))} (also "
                f"{', '.join(list(PRESETS)[1:])}), autoattack:linf=8/255, autoattack:l2=0.5",
                option="suites",
            )
        threats = [parse_threat(argument) for argument in self.arguments]
        if len(set(threats)) < len(threats):
            raise InputError(f"autoattack: the same threat is given twice: {', '.join(self.arguments)}")

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        if evaluator.classes < 4:
            raise InputError(
                f"autoattack: expected a model with 4 classes or more, which its loss needs, got "
                f"{evaluator.classes}. Use the suite attacks.",
                option="suites",
            )
        published = {"attack_steps": STEPS, "square_queries": QUERIES}
        changed = [f"{name} {self.values[name]}" for name, n in published.items() if self.values[name] != n]
        if changed:
            self.notes.append(f"not the published AutoAttack: {', '.join(changed)}")
        for norm, epsilon in map(parse_threat, self.arguments):
            level = gray_levels(epsilon) if norm == "linf" else epsilon
            after = [Setting(self.name, f"after_{name}_{norm}", level, minor=True) for name in ATTACKS[:-1]]
            settings = (*after, Setting(self.name, f"autoattack_{norm}", level))
            yield Condition(self.name, settings, (TOP1,), unchanged=True, argument=(norm, epsilon))

    def trial(self, evaluator: Evaluator, condition: Condition) -> Trial:
        steps, targets = self.values["attack_steps"], min(TARGETS, evaluator.classes - 1)
        gradients = (1 + targets) * (steps + 1) + targets * steps
        passes = targets * steps + self.values["square_queries"]
        cost = gradients + passes / 3  # in gradients: a forward and a backward pass take as long as three
        note = (
            f"{condition.settings[-1].label}: time of images that survive every attack; those that fall to "
            f"the first take 1/{cost / (steps + 1):.0f} of it"
        )
        return Trial(replace(condition, argument=None), cost / TIMED, note)

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        from steadygaze.robustness.attacks import pgd
        from steadygaze.robustness.auto_attack import autoattack

        images, labels = batch.first, batch.labels
        mean, std = evaluator.preprocess.mean, evaluator.preprocess.std
        if condition.argument is None:  # the dry run
            pgd(evaluator.model, images, labels, epsilon=1 / 255, steps=TIMED, mean=mean, std=std)
            return []
        norm, epsilon = condition.argument
        broken = evaluator.broken_rows(evaluator.logits(images))
        result = autoattack(
            evaluator.model,
            images,
            labels,
            norm=norm,
            epsilon=epsilon,
            seeds=[image_seed(evaluator.seed, f"autoattack {image.name}") for image in batch.images],
            steps=self.values["attack_steps"],
            queries=self.values["square_queries"],
            mean=mean,
            std=std,
        )
        return [
            Measurement(
                setting,
                TOP1,
                result.robust(name).double().cpu().numpy(),
                np.stack([labels.cpu().numpy(), result.predicted[name].cpu().numpy()], 1),
                broken,
            )
            for name, setting in zip(ATTACKS, condition.settings, strict=True)
        ]

    def _stages(self, card: Card) -> Iterator[tuple[str, list[Setting]]]:
        """Each threat with its settings, in the order of the attacks."""
        measured = card.measured_settings(self.name, TOP1.name)
        for final in (setting for setting in measured if not setting.minor):
            norm = final.name.removeprefix("autoattack_")
            names = [f"after_{name}_{norm}" for name in ATTACKS[:-1]]
            stages = [s for name in names for s in measured if (s.name, s.level) == (name, final.level)]
            radius = f"{final.level:g}/255" if norm == "linf" else f"{final.level:g}"
            yield f"{'L∞' if norm == 'linf' else 'L2'} {radius}", [*stages, final]

    def tables(self, card: Card) -> Iterator[Table]:
        rows = [
            [threat, *(card.text(s.label, TOP1.name) for s in [CLEAN, *stages])]
            for threat, stages in self._stages(card)
        ]
        if rows:
            columns = ["threat", "clean", *(f"after {name}" for name in ATTACKS)]
            yield Table("AutoAttack: robust accuracy, %", columns, rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        for threat, stages in self._stages(card):
            numbers = [card.numbers.get((s.label, TOP1.name)) for s in [CLEAN, *stages]]
            titles = ["clean", *(f"after {name.upper()}" for name in ATTACKS)]
            bars = [
                bar(number, title, 1 if title != "clean" else 2)
                for number, title in zip(numbers, titles, strict=True)
                if number is not None
            ]
            caption = "each attack on the images that survived those before it; whiskers are 95 % intervals"
            yield BarChart(f"AutoAttack, {threat}", bars, "robust accuracy, %", caption, highest=100)
