"""Attention: how spread out it is, and how it changes under corruption (docs/equations.md#attention-entropy,
docs/equations.md#attention-stability).

| setting | metrics |
| --- | --- |
| `clean` | attention_entropy, _overfocus, _gini, _peak, _distance, _head_similarity, _token_similarity |
| each corruption at one severity, such as `fog/3` | the same, and attention_stability |

A row's value is the mean over layers, its detail the mean over heads of each layer. Score:
attention_stability of `corruptions`, the mean over corruptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from steadygaze.errors import MethodUnavailableError
from steadygaze.quantity import Quantity
from steadygaze.runs.card import Card
from steadygaze.runs.settings import (
    CLEAN,
    FADED,
    Condition,
    Figure,
    Line,
    LineChart,
    Measurement,
    SampleImage,
    Score,
    Setting,
    Table,
    Views,
)
from steadygaze.runs.suite import Suite, register_suite
from steadygaze.runs.suites.corruptions import CORRUPTION_OPTIONS, corrupted, sample_settings

if TYPE_CHECKING:
    from torch import Tensor

    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView

SUMMARIES = {
    "entropy": "in nats; high: spread out",
    "overfocus": "share of the five most attended tokens",
    "gini": "inequality of the attention that tokens receive; 0: even",
    "peak": "the most attended token, in multiples of an even share",
    "distance": "in patches; high: attends to distant tokens",
    "head_similarity": "cosine between heads; higher: heads attend to the same",
    "token_similarity": "cosine between the attention of two tokens; higher: tokens attend to the same",
}
MEASURES = {
    name: Quantity(f"attention_{name}", better="neither", summary=text) for name, text in SUMMARIES.items()
}
STABILITY = Quantity(
    "attention_stability", summary="cosine between clean and corrupted attention; 1: unchanged"
)
CLEAN_METRICS = tuple(MEASURES.values())


@register_suite("attention")
class Attention(Suite):
    """Attention maps of clean and corrupted images."""

    title = "Attention"
    summary = (
        "Entropy, overfocus and other measures of attention by layer, and its stability under corruption."
    )
    options = CORRUPTION_OPTIONS
    outputs = ("classes", "labels", "values", "features")
    quantities = (*CLEAN_METRICS, STABILITY)
    tiles: ClassVar = {("corruptions", "attention_stability"): "attention stability"}

    def conditions(self, evaluator: Evaluator) -> Iterator[Condition]:
        vit = evaluator.vit
        if vit is None or not vit.plan.global_attention:
            kind = "not a vision transformer"
            if vit is not None:
                kind = f"a {vit.plan.kind}, whose attention is not over all tokens"
            raise MethodUnavailableError(
                f"attention: {evaluator.name} is {kind}. Leave the suite attention out."
            )
        yield Condition(self.name, (CLEAN,), CLEAN_METRICS, unchanged=True)
        for setting in sample_settings(self):
            yield Condition(self.name, (setting,), (*CLEAN_METRICS, STABILITY), views=2)

    def make(self, image: ImageView, condition: Condition) -> Views:
        if condition.setting == CLEAN:
            return image.pixels()[None]
        return np.stack([image.pixels(), corrupted(image, condition.setting)])

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """By layer, mean over heads; the last view is measured, and compared with the first."""
        import torch

        from steadygaze.robustness import attention as measures

        assert evaluator.vit is not None
        views = list(batch.views.unbind(1))
        distances = measures.patch_distances(evaluator.vit, views[0])
        by_layer: dict[Quantity, list[Tensor]] = {metric: [] for metric in condition.metrics}

        def add_layer(layer: int, *maps: Tensor) -> None:
            a = maps[-1]
            values = (
                measures.entropy(a),
                measures.overfocus(a, min(measures.TOP, a.shape[-1])),
                measures.gini(a),
                measures.peak(a),
                measures.distance(a, distances),
                measures.head_similarity(a),
                measures.token_similarity(a),
            )
            for metric, value in zip(CLEAN_METRICS, values, strict=True):
                by_layer[metric].append(value if value.dim() == 1 else value.mean(1))
            if len(maps) > 1:
                by_layer[STABILITY].append(measures.stability(maps[0], a).mean(1))

        measures.walk(evaluator.vit, views, add_layer)
        measurements = []
        for metric, values in by_layer.items():
            details = torch.stack(values, 1).float().cpu().numpy()
            measurements.append(Measurement(condition.setting, metric, details.mean(1), details))
        return measurements

    def samples(self, evaluator: Evaluator, image: ImageView) -> Iterator[SampleImage]:
        import torch

        from steadygaze.robustness.attention import attention_figure

        setting = sample_settings(self)[0]
        views = [image.pixels(), corrupted(image, setting)]
        clean, under = (
            evaluator.normalize(torch.from_numpy(view.copy()).permute(2, 0, 1)[None]) for view in views
        )
        images = [Image.fromarray(view) for view in views]
        sheet = attention_figure(evaluator.model, clean, under, cell=160, images=images)
        title = f"Attention of the last layer: clean, and under {setting.words}."
        yield SampleImage(f"{title} Bright columns: tokens that all others attend to.", sheet, wide=True)

    def scores(self, card: Card) -> Iterator[Score]:
        settings = card.measured_settings(None, STABILITY.name)
        numbers = [card.measured[setting.label, STABILITY.name] for setting in settings]
        if numbers:
            mean = np.mean([number.samples for number in numbers], axis=0)
            setting, note = Setting("corruptions", "corruptions"), f"mean over {len(numbers)} corruptions"
            yield Score(setting, STABILITY, mean, numbers[0].images, note, headline=True)

    def tables(self, card: Card) -> Iterator[Table]:
        first = card.curve(CLEAN.label, CLEAN_METRICS[0].name)
        if first is None:
            return
        rows = []
        for metric in MEASURES.values():
            curve = card.curve(CLEAN.label, metric.name)
            if curve is not None:
                cells = [f"{value:.2f}" for value in curve[0]]
                rows.append([metric.title, *cells, card.text(CLEAN.label, metric.name, spread=False)])
        curves = _corrupted_curves(card, STABILITY)
        if curves:
            cells = [f"{value:.2f}" for value in np.mean(list(curves.values()), axis=0)]
            mean = card.text("corruptions", STABILITY.name, spread=False)
            rows.append([f"{STABILITY.title}, corrupted", *cells, mean])
        layers = [str(layer) for layer in range(len(first[0]))]
        yield Table("attention by layer, mean over heads", ["clean", *layers, "mean"], rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        for name, metric in {**MEASURES, "stability": STABILITY}.items():
            title = name.replace("_", " ")
            lines: list[Line] = []
            clean = card.curve(CLEAN.label, metric.name)
            if clean is not None:
                mean, half = clean
                limits = list(zip((mean - half).tolist(), (mean + half).tolist(), strict=True))
                lines.append(Line("clean", _layers(mean), mean.tolist(), 1, limits))
            curves = _corrupted_curves(card, metric)
            if curves:
                mean = np.mean(list(curves.values()), axis=0)
                lines.append(Line("corrupted, mean", _layers(mean), mean.tolist(), 0))
                lines += [Line(label, _layers(c), c.tolist(), FADED) for label, c in curves.items()]
            if lines:
                yield LineChart(
                    title.capitalize(),
                    lines,
                    "layer (0: the first)",
                    metric.title,
                    metric.summary,
                    integers=True,
                )


def _layers(curve: Any) -> list[int]:
    return list(range(len(curve)))


def _corrupted_curves(card: Card, metric: Quantity) -> dict[str, np.ndarray]:
    """label -> values by layer, of each corruption."""
    settings = card.measured_settings(None, metric.name)
    curves = {s.label: card.curve(s.label, metric.name) for s in settings if s != CLEAN}
    return {label: curve[0] for label, curve in curves.items() if curve is not None}
