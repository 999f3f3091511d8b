"""What a model's outputs mean, and what is explained: a class (`target`) and a quantity of it (`score`).

Formulas: docs/equations.md#target-score. What the outputs y mean:

| outputs  | task           | prediction                           | problem_type of transformers |
| classes  | classification | softmax(y); sigmoid(y) of one logit  | single_label_classification  |
| labels   | multilabel     | sigmoid(y_k), one label at a time    | multi_label_classification   |
| values   | regression     | y itself                             | regression                   |
| features |                | none: an embedding, no classifier    |                              |

The score, for classes:

| score    | quantity T of class c, from logits y                    |
| logit    | y_c                                                     |
| log_prob | y_c − logsumexp_k y_k                                   |
| log_odds | y_c − logsumexp_{k≠c} y_k: log p/(1−p)                  |
| contrast | y_c − max_{k≠c} y_k: against the runner-up              |
| prob     | p_c = exp(log_prob): what the black-box methods explain |

A classifier with a single logit y is binary: p = sigmoid(y), and y is the log-odds (the other class has
logit 0). So is each label of a multi-label model, which therefore has no runner-up and no contrast. A value
(regression) is explained itself: its one score is `value`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.quantity import percent

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

SCORES = ("logit", "log_prob", "log_odds", "contrast", "prob")
SCORES_OF: dict[Outputs, tuple[str, ...]] = {
    "classes": SCORES,
    "labels": ("logit", "log_prob", "log_odds", "prob"),
    "values": ("value", "logit"),  # "logit" is the output itself for every model
    "features": SCORES,
}
CallableTarget = Callable[[Tensor], Tensor]
Target = None | int | Sequence[int] | Tensor | CallableTarget


def outputs_of_task(task: str) -> Outputs:
    """What the outputs of a model for this task mean.

    Examples:
        >>> outputs_of_task("multilabel")
        'labels'
    """
    if task not in TASKS:
        raise UnknownNameError("task", str(task), TASKS)
    return TASKS[task]


def task_of_outputs(outputs: Outputs) -> Task | None:
    """The task whose models have such outputs; None for features.

    Examples:
        >>> task_of_outputs("labels")
        'multilabel'
    """
    tasks: dict[Outputs, Task] = {"classes": "classification", "labels": "multilabel", "values": "regression"}
    return tasks.get(outputs)


def own_task(model: Any) -> Task | None:
    """The task that a model of transformers states in its configuration; None if it states none."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return PROBLEM_TYPES.get(problem) if isinstance(problem, str) else None


def check_class_names(names: Sequence[str], module: Any) -> None:
    """Raise `InputError` unless there are as many names as the model says it has classes."""
    config = getattr(module, "config", None)
    classes = getattr(module, "num_classes", None) or getattr(config, "num_labels", None)
    if isinstance(classes, int) and classes != len(names):
        raise InputError(
            f"expected {classes} class names, as many as {type(module).__name__} has classes, got "
            f"{len(names)}",
            option="class_names",
        )


def at_least_float32(x: Tensor) -> Tensor:
    """x in its own precision or float32, whichever is higher, so that half precision is not rounded twice.

    Examples:
        >>> at_least_float32(torch.zeros(1, dtype=torch.float16)).dtype
        torch.float32
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def class_index_of(name: str, names: Sequence[str], model: str) -> int:
    """The class with this name or number. Names are compared without case, first as a whole, then by each
    part between commas.

    Args:
        names: Of all classes.
        model: Name of the model, for errors.

    Examples:
        >>> class_index_of("Tabby", ["dog", "tabby, tabby cat"], "model")
        1
    """
    if name.isdecimal():
        return int(name)
    wanted = name.strip().lower()
    splits: tuple[Callable[[str], list[str]], ...] = (lambda text: [text], lambda text: text.split(","))
    for split in splits:
        matches = [
            index
            for index, class_name in enumerate(names)
            if wanted in [part.strip() for part in split(class_name.lower())]
        ]
        if len(matches) > 1:
            listing = ", ".join(f"{index} ({names[index]})" for index in matches)
            raise InputError(
                f"{name!r} is the name of {len(matches)} classes of {model}: {listing}. "
                "Give the number of one."
            )
        if matches:
            return matches[0]
    known = {part.strip() for class_name in names for part in class_name.split(",")}
    raise UnknownNameError("class", name, known)


def predictions(outputs: Outputs, logits: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c"]:
    """Probabilities of classes or of labels; values as they are.

    Examples:
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

    Args:
        number: The probability or the value.
        alone: Whether the model has no other output.

    Examples:
        >>> describe("values", 0, 37.2, alone=True)
        'value 37.2'
    """
    name, text = output_name(outputs, index, names, alone=alone), number_text(outputs, number)
    is_numbered = outputs != "classes" and name == f"{NOUNS[outputs]} {index}"
    return f"{name}: {text}" if is_numbered else f"{name} {text}"


def output_name(
    outputs: Outputs, index: int, names: Sequence[str] | None = None, *, alone: bool = False
) -> str:
    """The name of one output, or a noun and its number. alone: whether the model has no other output.

    Examples:
        >>> output_name("classes", 3), output_name("values", 0, alone=True)
        ('class 3', 'value')
    """
    if names:
        return names[index]
    return NOUNS[outputs] if alone and outputs == "values" else f"{NOUNS[outputs]} {index}"


def number_text(outputs: Outputs, number: float) -> str:
    """The number of a prediction as text: "62 %" of a class, "0.93" of a label, "37.2" of a value.

    Examples:
        >>> number_text("classes", 0.62)
        '62 %'
    """
    if outputs == "classes":
        return percent(number)
    return f"{number:.2f}" if outputs == "labels" else f"{number:.4g}"


def summarize(outputs: Outputs, numbers: Sequence[float], names: Sequence[str] | None = None) -> str:
    """What a model predicts, in words: its class, every label above 0.5, or every value.

    Examples:
        >>> summarize("labels", [0.93, 0.2, 0.88], ["cat", "car", "dog"])
        'cat 0.93 and dog 0.88'
    """
    best = max(range(len(numbers)), key=lambda index: numbers[index])
    chosen = [best]
    if outputs == "labels":
        present = sorted((i for i, p in enumerate(numbers) if p > PRESENT), key=lambda i: -numbers[i])
        chosen = present or [best]
    elif outputs != "classes":
        chosen = list(range(len(numbers)))
    texts = [describe(outputs, i, numbers[i], names, alone=len(numbers) == 1) for i in chosen]
    text = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"none above {PRESENT}; {text}" if outputs == "labels" and numbers[best] <= PRESENT else text


def check_score(score: str, outputs: Outputs) -> str:
    """The score, if outputs of this kind have it; else an error that says why not.

    Examples:
        >>> check_score("log_odds", "classes")
        'log_odds'
    """
    if score in SCORES_OF[outputs]:
        return score
    if outputs == "labels" and score == "contrast":
        raise InputError(
            "score='contrast' compares classes of which one holds, but the labels of this model are "
            "independent of one another. Use log_odds, which for a label is the logit itself.",
            option="score",
        )
    if outputs == "values" and score in SCORES:
        raise InputError(
            f"score={score!r} is a score of classes, but this model gives values (regression), which have no "
            f"probability. Leave score out: the value itself is explained.",
            option="score",
        )
    raise UnknownNameError("score", str(score), SCORES_OF[outputs])


def default_score(score: str, outputs: Outputs) -> str:
    """A method's own score for outputs of this kind: a value is explained itself, a label by its odds.

    Examples:
        >>> default_score("log_odds", "values")
        'value'
    """
    if outputs == "values":
        return "value"
    return score if score in SCORES_OF[outputs] else "log_odds"


def resolve_target(
    target: Any, logits: Float[Tensor, "b c"], outputs: Outputs = "classes"
) -> Int[Tensor, " b"] | Int[Tensor, "b k"] | None:
    """The classes to explain: (B,), or (B, K) for several per image; None if no class is explained.

    Args:
        target: None (the predicted class, or the most probable label; of features, none), a class index, one
            index per image, shape (B, K), or a callable.

    Examples:
        >>> resolve_target(2, torch.zeros(2, 3)).tolist()
        [2, 2]
    """
    batch, classes = logits.shape
    if callable(target) or (target is None and outputs == "features"):
        return None
    if target is None:
        if outputs == "values" and classes > 1:
            raise InputError(
                f"target: this model gives {classes} values (regression), and none of them is the predicted "
                f"one. Give the index of the value to explain, 0..{classes - 1}.",
                option="target",
            )
        return logits.argmax(-1)
    index = class_indices(target, batch).to(logits.device)
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise InputError(
            f"target: {NOUNS[outputs]} {wrong} is out of range; the model has {outputs} 0..{classes - 1}"
        )
    return index


def class_indices(target: Any, batch: int) -> Int[Tensor, " b"] | Int[Tensor, "b k"]:
    """One class, one per image or several per image, as an index for each of `batch` images.

    Examples:
        >>> class_indices(2, batch=3).tolist(), class_indices([2, 0], batch=2).tolist()
        ([2, 2, 2], [2, 0])
    """
    if isinstance(target, (bool, float, str)):
        raise InputError(
            f"target: expected None, a class index, one index per image, or a callable, got {target!r}"
        )
    try:
        index = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"target: expected class indices, got {target!r} ({error})") from None
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(f"target: expected integer class indices, got {index.dtype}")
    if index.dim() == 0:
        index = index.expand(batch)
    if index.dim() not in (1, 2) or index.shape[0] != batch or index.numel() == 0:
        raise InputError(
            f"target: expected one class, {batch} classes (one per image) or shape ({batch}, K), "
            f"got shape {tuple(index.shape)} for a batch of {batch}"
        )
    return index.long().clone()  # int64, and no tensor of inference mode


def class_score(
    score: str, logits: Float[Tensor, "b c"], target: Int[Tensor, " b"], outputs: Outputs = "classes"
) -> Float[Tensor, " b"]:
    """The explained quantity T of class (label, value) `target`, one number per image.

    Examples:
        >>> class_score("log_odds", torch.tensor([[0.0, 0.0]]), torch.tensor([1])).tolist()
        [0.0]
    """
    check_score(score, outputs)
    if outputs == "labels":  # each label is a binary classifier of its own
        logits, target = logits.gather(1, target[:, None]), torch.zeros_like(target)
    if logits.shape[1] == 1:
        logits = F.pad(logits, (0, 1))
    y = logits.gather(1, target[:, None])[:, 0]
    if score in ("logit", "value"):
        return y
    if score == "log_prob":
        return y - logits.logsumexp(-1)
    if score == "prob":
        return (y - logits.logsumexp(-1)).exp()
    others = logits.masked_fill(F.one_hot(target, logits.shape[1]).bool(), float("-inf"))
    return y - (others.logsumexp(-1) if score == "log_odds" else others.max(-1).values)


def target_value(
    target: Int[Tensor, " b"] | CallableTarget,
    score: str,
    logits: Float[Tensor, "b c"],
    outputs: Outputs = "classes",
) -> Float[Tensor, " b"]:
    """The explained quantity T, one number per image: of a class, or what a callable target returns.

    Examples:
        >>> target_value(torch.tensor([1]), "logit", torch.tensor([[0.0, 2.0]]))
        tensor([2.])
    """
    if isinstance(target, Tensor):
        return class_score(score, logits, target, outputs)
    value = target(logits)
    if not isinstance(value, Tensor) or value.shape != logits.shape[:1] or not value.requires_grad:
        got = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        got += " without a gradient" if isinstance(value, Tensor) and not value.requires_grad else ""
        raise InputError(
            f"target: a callable must return a differentiable tensor of shape ({logits.shape[0]},), got {got}"
        )
    return value
