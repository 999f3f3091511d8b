"""Occlusion: a center square painted over, and tokens dropped at random or by salience
(docs/equations.md#occlusion).

| setting | metrics |
| --- | --- |
| `center_square/0.5` | top1, top5, confidence |
| `random_drop`, `salient_drop` (of a ViT) | drop_right, drop_probability: means over shares |

A row's detail is the curve over the shares of dropped tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from steadygaze.errors import MethodUnavailableError
from steadygaze.methods.registry import DEFAULT, parse_method, unavailable
from steadygaze.runs.card import Card
from steadygaze.runs.settings import Condition, Figure, Line, LineChart, Measurement, Setting, Table, share
from steadygaze.runs.suite import Option, Suite, register_suite

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch

DROPS = ("random_drop", "salient_drop")
DROP_ACCURACY = share("drop_right", "accuracy")
DROP_PROBABILITY = share("drop_probability", "probability")


@register_suite("occlusion")
class Occlusion(Suite):
    """Occluded images; of a ViT, fewer tokens."""

    title = "Occlusion"
    summary = "A masked center square; of a ViT also tokens dropped at random, and the most salient first."
    options = (Option("salient", str, DEFAULT),)
    quantities = (DROP_ACCURACY, DROP_PROBABILITY)
    compared = ("shares", "salient")

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        square = Setting(self.name, "center_square", 0.5)
        yield Condition(self.name, (square,), evaluator.predictions, unchanged=True)
        if evaluator.vit is None:
            self.notes.append(
                f"random_drop and salient_drop are left out: {evaluator.name} is not a vision transformer, "
                "it has no tokens to drop"
            )
            return
        reason = unavailable(parse_method(self.values["salient"]), evaluator.vit)
        if reason:
            raise MethodUnavailableError(
                f"salient_drop by {self.values['salient']}: {reason}. Choose another method.",
                option="salient",
            )
        for name in DROPS:
            metrics = (DROP_ACCURACY, DROP_PROBABILITY)
            yield Condition(self.name, (Setting(self.name, name),), metrics, unchanged=True)

    def facts(self) -> dict[str, Any]:
        from steadygaze.robustness.occlusion import SHARES

        return {"shares": list(SHARES), **self.values}

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        from steadygaze.robustness.occlusion import center_square

        if condition.setting.name in DROPS:
            return self._drop(evaluator, condition, batch)
        assert isinstance(condition.setting.level, float)
        hidden = center_square(batch.first, share=condition.setting.level)
        return evaluator.classify(condition.setting, evaluator.logits(hidden), batch.correct)

    def _drop(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        from steadygaze.robustness.occlusion import SHARES, random_drop, salient_drop
        from steadygaze.runs.maps import maps_of
        from steadygaze.vit.clean_forward import CleanForward

        assert evaluator.vit is not None
        vit, images, labels = evaluator.vit, batch.first, batch.labels
        flags: dict[int, str] = {}
        if condition.setting.name == "random_drop":
            generators = evaluator.generators("drop", batch.images)
            curve = random_drop(vit, images, labels, generator=generators, shares=SHARES)
            notes = []
        else:
            predicted = evaluator.logits(images).argmax(1)
            clean = CleanForward.of(vit, images)
            made = maps_of(clean, predicted, [parse_method(self.values["salient"])], None)[0]
            maps, flags = made.maps, made.flags
            curve = salient_drop(vit, images, labels, maps, shares=SHARES)
            notes = [f"by {self.values['salient']}"]
        if curve.means != "removal":
            notes.append(curve.means)
        measurements = []
        for metric, points in ((DROP_ACCURACY, curve.right), (DROP_PROBABILITY, curve.probability)):
            details = points.float().cpu().numpy()
            note = ", ".join(notes)
            measurements.append(Measurement(condition.setting, metric, details.mean(1), details, flags, note))
        return measurements

    def tables(self, card: Card) -> Iterator[Table]:
        rows = []
        for name in DROPS:
            curve = card.curve(name, DROP_ACCURACY.name)
            if curve is not None:
                points = [f"{100 * point:.1f}" for point in curve[0]]
                rows.append([_title(card, name), *points, card.text(name, DROP_ACCURACY.name)])
        if rows:
            shares = [f"{s:g}" for s in card.run["settings"].get("shares") or ()]
            yield Table("accuracy while tokens are dropped, %", ["share dropped", *shares, "mean"], rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        shares = [100 * s for s in card.run["settings"].get("shares") or ()]
        lines = []
        for group, name in enumerate(DROPS):
            curve = card.curve(name, DROP_ACCURACY.name)
            if curve is not None and len(curve[0]) == len(shares):
                mean, half = 100 * curve[0], 100 * curve[1]
                low, high = (mean - half).clip(0).tolist(), (mean + half).clip(max=100).tolist()
                limits = list(zip(low, high, strict=True))
                lines.append(Line(_title(card, name), shares, mean.tolist(), group, limits))
        if lines:
            yield LineChart("While tokens are dropped", lines, "share of tokens dropped, %", "accuracy, %")


def _title(card: Card, name: str) -> str:
    note = card.numbers[name, DROP_ACCURACY.name].note
    return f"{name.replace('_', ' ')} {note}".strip()
