"""Visual question answering: a ViLT on questions about clean and corrupted images (VQAv2's files).

| setting | metrics |
| --- | --- |
| `vqa/clean`, `vqa/fog/3`, ... | vqa_accuracy (docs/equations.md#vqa-accuracy) |

| score | setting | what |
| --- | --- | --- |
| vqa_accuracy | `vqa/fog` | mean over severities |
| mean_vqa_accuracy, vqa_retention | `vqa` | mean over corruptions, and its share of the clean accuracy |

A row is one question. Images are resized and cropped to a square, so that they can be batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from steadygaze.data.datasets.tree import abbreviated
from steadygaze.data.datasets.vqa import VisualQuestionItem, read_vqa
from steadygaze.data.folders import Item
from steadygaze.data.images import names_hash, read_image
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.robustness.vqa import vqa_accuracy
from steadygaze.runs.card import Card
from steadygaze.runs.jobs import RunImage
from steadygaze.runs.settings import Condition, Figure, Measurement, Score, Setting, Table, Views, share
from steadygaze.runs.suite import ImageSet, Suite, register_suite
from steadygaze.runs.suites.corruptions import (
    CORRUPTION_OPTIONS,
    by_corruption,
    corrupted,
    error_bars,
    severities_of,
)

if TYPE_CHECKING:
    from steadygaze.runs.evaluator import Evaluator
    from steadygaze.runs.source import Batch, ImageView

ACCURACY = share("vqa_accuracy", "VQA accuracy")
MEAN_ACCURACY = share("mean_vqa_accuracy", "mean VQA accuracy")
RETENTION = share("vqa_retention", "retention")


class QuestionReader:
    """Reads the image of a question."""

    ready = False

    def read(self, item: Item) -> Image.Image:
        return read_image(item.path)


@register_suite("vqa")
class VisualQuestions(Suite):
    """A model that answers questions, on clean and corrupted images."""

    title = "Visual question answering"
    summary = "VQA accuracy of a ViLT on clean and corrupted images; VQAv2's questions and annotations."
    argument = "FOLDER"
    options = CORRUPTION_OPTIONS
    own_images = True
    quantities = (ACCURACY, MEAN_ACCURACY, RETENTION)
    tiles: ClassVar = {
        ("vqa/clean", "vqa_accuracy"): "clean, VQA accuracy",
        ("vqa", "mean_vqa_accuracy"): "mean VQA accuracy, corrupted",
        ("vqa", "vqa_retention"): "retention",
    }
    compared = ("questions",)

    def check(self) -> None:
        if len(self.arguments) != 1:
            raise InputError("expected vqa:FOLDER, with VQAv2's questions, annotations and images, once")
        self.folder = Path(self.arguments[0])

    def open(self, limit: int | None) -> None:
        items, missing = read_vqa(self.folder)
        self.items = {f"{self.name}:{item.question_id}": item for item in items[:limit]}
        if missing:
            numbers = [str(number) for number in missing]
            self.notes.append(f"vqa: {len(missing)} questions left out: no image ({abbreviated(numbers)})")

    def facts(self) -> dict[str, Any]:
        return {
            **self.values,
            "questions": {"count": len(self.items), "hash": names_hash(self.items)},
        }

    def image_sets(self, evaluator: Evaluator) -> Iterator[ImageSet]:
        from steadygaze.questions.text import find_tokenizer
        from steadygaze.questions.vqa import answers_questions

        if not answers_questions(evaluator.model):
            raise UnsupportedModelError(
                f"vqa: expected a ViltForQuestionAnswering, got {type(evaluator.model).__name__}"
            )
        self.tokenizer = find_tokenizer(evaluator.model, evaluator.tokenizer, evaluator.name)
        images = tuple(self._image(name, item) for name, item in self.items.items())
        settings = [Setting(self.name, "clean", source=self.name, label="vqa/clean")]
        for name in self.values["corruptions"]:
            for severity in self.values["severities"]:
                label = f"vqa/{name}/{severity}"
                settings.append(Setting(self.name, name, severity, self.name, label, minor=True))
        conditions = tuple(Condition(self.name, (setting,), (ACCURACY,)) for setting in settings)
        yield ImageSet(self.name, images, conditions)

    def _image(self, name: str, item: VisualQuestionItem) -> RunImage:
        return RunImage(name, (0,), Item(name, item.image, None), QuestionReader())

    def make(self, image: ImageView, condition: Condition) -> Views:
        clean = condition.setting.level is None
        return (image.pixels() if clean else corrupted(image, condition.setting))[None]

    def measure(self, evaluator: Evaluator, condition: Condition, batch: Batch) -> list[Measurement]:
        """The accuracy of each question's answer."""
        import torch

        from steadygaze.questions.vqa import answer_logits

        items = [self.items[image.name] for image in batch.images]
        questions = [item.question for item in items]
        parts = []
        for start in range(0, len(items), evaluator.batch_size):
            part = slice(start, start + evaluator.batch_size)
            parts.append(answer_logits(evaluator.model, self.tokenizer, questions[part], batch.first[part]))
        logits = torch.cat(parts)
        names: dict[int, str] = evaluator.model.config.id2label  # type: ignore[union-attr, assignment]
        given = [names[index] for index in logits.nan_to_num(0.0).argmax(1).tolist()]
        values = [vqa_accuracy(answer, item.answers) for answer, item in zip(given, items, strict=True)]
        broken = evaluator.broken_rows(logits)
        return [Measurement(condition.setting, ACCURACY, np.array(values), None, broken)]

    def scores(self, card: Card) -> Iterator[Score]:
        settings = by_corruption(card, self.name, self.name, ACCURACY)
        means, images = [], 0
        for name, levels in settings.items():
            numbers = [card.measured[setting.label, ACCURACY.name] for setting in levels.values()]
            images = max(images, *(number.images for number in numbers))
            means.append(np.mean([number.samples for number in numbers], axis=0))
            note = f"severities {', '.join(map(str, levels))}"
            yield Score(
                Setting(self.name, name, None, self.name, f"vqa/{name}"), ACCURACY, means[-1], images, note
            )
        if not means:
            return
        whole, mean = Setting(self.name, self.name, source=self.name), np.mean(means, axis=0)
        note = f"{len(means)} corruptions, made in memory; {images} questions"
        yield Score(whole, MEAN_ACCURACY, mean, images, note, headline=True)
        clean = card.samples("vqa/clean", ACCURACY)
        if clean is not None:
            yield Score(whole, RETENTION, mean / clean, images, note, headline=True)

    def tables(self, card: Card) -> Iterator[Table]:
        if not card.measured_settings(self.name, ACCURACY.name, self.name):
            return
        settings = by_corruption(card, self.name, self.name, ACCURACY)
        severities, rows = severities_of(settings), []
        for name, levels in settings.items():
            cells = [
                card.text(levels[s].label, ACCURACY.name, spread=False) if s in levels else ""
                for s in severities
            ]
            rows.append([name, *cells, card.text(f"vqa/{name}", ACCURACY.name)])
        rows.insert(0, ["clean", *("" for _ in severities), card.text("vqa/clean", ACCURACY.name)])
        yield Table("VQA accuracy, %", ["corruption", *(f"at {s}" for s in severities), "mean"], rows)

    def figures(self, card: Card) -> Iterator[Figure]:
        labels = {name: f"vqa/{name}" for name in by_corruption(card, self.name, self.name, ACCURACY)}
        if labels:
            yield error_bars(card, labels, ACCURACY, "VQA accuracy by corruption", "VQA accuracy")
