"""The model of a stress run: from pixels to predictions, and from predictions to measurements.

The clean images, which every run over data measures, and what all predictions have: calibration, and the
table and chart of every setting that is part of no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import UnsupportedModelError
from steadygaze.quantity import Quantity
from steadygaze.questions.regions import scores_of
from steadygaze.robustness.calibration import confidences
from steadygaze.robustness.shift import any_correct
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.maps import BROKEN
from steadygaze.runs.prepare import number_of_classes
from steadygaze.runs.rows import Row, json_number
from steadygaze.runs.settings import (
    BROKEN_LOGITS,
    CONFIDENCE,
    TOP1,
    TOP5,
    Measurement,
    Setting,
    restricted,
)
from steadygaze.seeding import image_seed
from steadygaze.target import Outputs, outputs_of_task, own_task
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of, run_model
from steadygaze.vit.view import ViT


class Evaluator:
    """A model and how it is run.

    Attributes:
        preprocess: Of the model; of images in memory their size, mean and std.
        classes: Number of classes.
        batch_size: Images in one forward pass.
        seed: Random seed of the run.
        task: What its outputs are; None: what the model itself states.
        tokenizer: Of a model that answers questions.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        *,
        name: str = "",
        classes: int = 0,
        batch_size: int = 16,
        seed: int = 0,
        task: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.model, self.preprocess, self.name, self.classes = model, preprocess, name, classes
        self.batch_size, self.seed, self.task, self.tokenizer = batch_size, seed, task, tokenizer
        parameter = next(iter(model.parameters()), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.dtype = torch.float32 if parameter is None else parameter.dtype

    @cached_property
    def vit(self) -> ViT | None:
        """The model as a vision transformer; None if it is none."""
        try:
            return adapt(self.model, self.task)
        except UnsupportedModelError:
            return None

    @cached_property
    def outputs(self) -> Outputs:
        """What the model gives: classes, labels or values."""
        task = self.task or own_task(self.model)
        if task is not None:
            return outputs_of_task(task)
        return "classes" if self.vit is None else self.vit.plan.outputs

    @property
    def predictions(self) -> tuple[Quantity, ...]:
        """What `classify` measures: top1, top5 and confidence; without top5 if the model has few classes."""
        return (TOP1, TOP5, CONFIDENCE) if self.classes > 5 else (TOP1, CONFIDENCE)

    def normalize(self, images: UInt8[Tensor, "*b 3 h w"]) -> Float[Tensor, "*b 3 h w"]:
        """8-bit images as the model takes them, on its device."""
        return self.preprocess.normalize(images.to(self.device)).to(self.dtype)

    def logits(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes"]:
        with torch.no_grad(), evaluation_mode(self.model):
            parts = [logits_of(run_model(self.model, part)) for part in images.split(self.batch_size)]
        precise = torch.promote_types(parts[0].dtype, torch.float32)
        return torch.cat(parts).to(precise)

    def generators(self, purpose: str, images: Sequence[RunImage]) -> list[torch.Generator]:
        """A generator for each image, by its name: the same numbers in any order, batch and process."""
        seeds = [image_seed(self.seed, f"{purpose} {image.name}") for image in images]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def classify(
        self,
        setting: Setting,
        logits: Float[Tensor, "b classes"],
        correct: Sequence[tuple[int, ...]],
        classes: Sequence[int] | None = None,
    ) -> list[Measurement]:
        """top1 with [label, predicted class], top5, confidence; restricted to `classes` if given (then
        without confidence)."""
        broken = self.broken_rows(logits)
        logits = logits.nan_to_num(0.0, 0.0, 0.0) if broken else logits
        measurements = []
        for k, metric in ((1, TOP1), (5, TOP5)):
            if metric not in self.predictions:
                continue
            hits = any_correct(logits, correct, k=k, classes=classes).double().cpu().numpy()
            if classes is not None:
                measurements.append(Measurement(setting, restricted(k, len(classes)), hits, None, broken))
                continue
            details = None
            if k == 1:
                labels = [classes_of_image[0] for classes_of_image in correct]
                details = np.stack([labels, logits.argmax(1).cpu().numpy()], 1)
            measurements.append(Measurement(setting, metric, hits, details, broken))
        if classes is None:
            confidence = confidences(logits).to(torch.float32).cpu().numpy()
            measurements.append(Measurement(setting, CONFIDENCE, confidence, None, broken))
        return measurements

    @staticmethod
    def broken_rows(values: Float[Tensor, "b *d"]) -> dict[int, str]:
        """The rows with NaN or infinite values, flagged."""
        finite = torch.isfinite(values).flatten(1).all(1)
        return dict.fromkeys((~finite).nonzero()[:, 0].tolist(), BROKEN_LOGITS)

    def rows(
        self, measurements: Sequence[Measurement], images: Sequence[RunImage], identity: dict[str, Any]
    ) -> Iterator[Row]:
        """The rows of a batch, by image."""
        for b, image in enumerate(images):
            for measurement in measurements:
                flag = measurement.flags.get(b)
                hidden = flag in (BROKEN, BROKEN_LOGITS)
                row: Row = {
                    **identity,
                    "setting": measurement.setting.label,
                    "metric": measurement.metric.name,
                    "image": image.name,
                    "value": None if hidden else json_number(measurement.values[b]),
                }
                if measurement.details is not None and not hidden:
                    row["detail"] = [json_number(x) for x in measurement.details[b]]
                if note := measurement.note or image.group:
                    row["note"] = note
                if flag:
                    row["flag"] = flag
                row["seed"] = self.seed
                yield row


def class_count(model: nn.Module, size: tuple[int, int], label_maps: bool) -> int:
    """Number of classes of a classifier, or of a segmenter."""
    if not label_maps:
        return number_of_classes(model, size)
    parameter = next(iter(model.parameters()), torch.zeros(0))
    with torch.no_grad(), evaluation_mode(model):
        output = model(torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype))
    return scores_of(output).shape[1]
