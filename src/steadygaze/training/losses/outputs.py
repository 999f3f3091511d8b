"""Logits of whatever a model returns, also while a distillation token is trained."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from steadygaze.vit.view import logits_of


def model_outputs(output: Any) -> Any:
    """The logits in a model's output: a tensor, or a pair if a distillation token is trained."""
    is_pair = isinstance(output, tuple) and all(isinstance(logits, Tensor) for logits in output)
    return output if is_pair else logits_of(output)


def class_logits(outputs: Any) -> Float[Tensor, "b classes ..."]:
    """The logits predictions are made from: of a class and a distillation token, their mean."""
    return outputs if isinstance(outputs, Tensor) else sum(outputs) / len(outputs)
