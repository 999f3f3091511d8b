"""What the outputs y of a model mean, and how a prediction is put into words; docs/equations.md#target-score.

| outputs  | task           | prediction                           | problem_type of transformers |
| classes  | classification | softmax(y); sigmoid(y) of one logit  | single_label_classification  |
| labels   | multilabel     | sigmoid(y_k), one label at a time    | multi_label_classification   |
| values   | regression     | y itself                             | regression                   |
| features |                | none: an embedding, no classifier    |                              |
"""

from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import UnknownName

Outputs = Literal["classes", "labels", "values", "features"]
Task = Literal["classification", "multilabel", "regression"]

TASKS: dict[str, Outputs] = {"classification": "classes", "multilabel": "labels", "regression": "values"}
PROBLEM_TYPES: dict[str, Task] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multilabel",
    "regression": "regression",
}
NOUNS: dict[Outputs, str] = {"classes": "class", "labels": "label", "values": "value", "features": "feature"}
PRESENT = 0.5  # a label is predicted if its probability is higher


def outputs_of_task(task: str) -> Outputs:
    """What the outputs of a model for this task mean.

    >>> outputs_of_task("multilabel")
    'labels'
    """
    if task not in TASKS:
        raise UnknownName("task", str(task), TASKS)
    return TASKS[task]


def task_of_outputs(outputs: Outputs) -> Task | None:
    """The task whose models have such outputs; None for features."""
    tasks: dict[Outputs, Task] = {"classes": "classification", "labels": "multilabel", "values": "regression"}
    return tasks.get(outputs)


def own_task(model: Any) -> Task | None:
    """The task that a model of transformers states in its configuration; None if it states none."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return PROBLEM_TYPES.get(problem) if isinstance(problem, str) else None


def predictions(outputs: Outputs, logits: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c"]:
    """Probabilities of classes or of labels; values as they are.

    >>> import torch
    >>> predictions("labels", torch.zeros(1, 2)).tolist()
    [[0.5, 0.5]]
    """
    if outputs in ("values", "features"):
        return logits
    if outputs == "labels" or logits.shape[-1] == 1:
        return logits.sigmoid()
    return logits.softmax(-1)


def describe(
    outputs: Outputs, index: int, number: float, names: Sequence[str] | None = None, *, alone: bool = False
) -> str:
    """One prediction in words: "tabby cat 62 %" of a class, "cat 0.93" of a label, "age 37.2" of a value.

    number: the probability or the value          alone: the model has no other output

    >>> describe("values", 0, 37.2, alone=True)
    'value 37.2'
    """
    name = names[index] if names else NOUNS[outputs] if alone and outputs == "values" else ""
    if outputs == "classes":
        return f"{name or f'class {index}'} {percent(number)}"
    text = f"{number:.2f}" if outputs == "labels" else f"{number:.4g}"
    return f"{name} {text}" if name else f"{NOUNS[outputs]} {index}: {text}"


def percent(probability: float | None) -> str:
    """A probability as text: "62 %", "99.7 %", "0.3 %"."""
    if probability is None:
        return ""
    share = 100 * probability
    return f"{share:.0f} %" if 1 <= share < 99 else f"{share:.1f} %"
