"""What is explained: which class (`target`) and which quantity of it (`score`).

| score    | quantity T of class c, logits y                       |
| logit    | y_c                                                   |
| log_prob | y_c − logsumexp_k y_k                                 |
| log_odds | y_c − logsumexp_{k≠c} y_k: log p/(1−p)                |
| contrast | y_c − max_{k≠c} y_k: against the runner-up            |
| prob     | p_c = exp(log_prob): what the black-box methods explain |

A classifier with one logit y says yes or no: p = sigmoid(y), and y is its log-odds (against no, whose logit is 0).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput, UnknownName

SCORES = ("logit", "log_prob", "log_odds", "contrast", "prob")
Target = None | int | Sequence[int] | Tensor | Callable[[Tensor], Tensor]


def resolve(target: Any, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"] | Int[Tensor, "b k"] | None:
    """The classes to explain: (B,), or (B, K) where several were asked for; None for a callable. No target: the predicted class.

    >>> resolve(2, torch.zeros(2, 3)).tolist()
    [2, 2]
    """
    batch, classes = logits.shape
    if callable(target):
        return None
    if target is None:
        return logits.argmax(-1)
    if isinstance(target, (bool, float, str)):
        raise BadInput(
            f"target: expected None, a class index, one index for each image, or a callable, got {target!r}"
        )
    try:
        index = torch.as_tensor(target, device=logits.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"target: expected class indices, got {target!r} ({error})") from None
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise BadInput(f"target: expected integer class indices, got {index.dtype}")
    if index.dim() == 0:
        index = index.expand(batch)
    if index.dim() not in (1, 2) or index.shape[0] != batch or index.numel() == 0:
        raise BadInput(
            f"target: expected one class, {batch} classes (one for each image) or shape ({batch}, K), got shape "
            f"{tuple(index.shape)} for a batch of {batch}"
        )
    index = index.long().clone()  # also of a small dtype, also from inference mode
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= classes:
        raise BadInput(
            f"target: class {low if low < 0 else high} is out of range; the model has classes 0..{classes - 1}"
        )
    return index


def quantity(score: str, logits: Float[Tensor, "b c"], target: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The number that is explained, for each image.

    >>> quantity("log_odds", torch.tensor([[0.0, 0.0]]), torch.tensor([1])).tolist()
    [0.0]
    """
    if score not in SCORES:
        raise UnknownName("score", score, SCORES)
    if logits.shape[1] == 1:
        logits = torch.nn.functional.pad(logits, (0, 1))
    y = logits.gather(1, target[:, None])[:, 0]
    if score == "logit":
        return y
    if score == "log_prob":
        return y - logits.logsumexp(-1)
    if score == "prob":
        return (y - logits.logsumexp(-1)).exp()
    others = logits.masked_fill(torch.nn.functional.one_hot(target, logits.shape[1]).bool(), float("-inf"))
    return y - (others.logsumexp(-1) if score == "log_odds" else others.max(-1).values)


def chances(logits: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c"]:
    """Probabilities of the classes: softmax, or sigmoid where there is one logit."""
    return logits.softmax(-1) if logits.shape[-1] > 1 else logits.sigmoid()
