"""The state of an Adam optimiser as named tensors, to write it to a file and read it back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(name: str, parameter: Tensor, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimiser remembers of a parameter; empty if it has not moved it yet."""
    return {f"adam.{key}.{name}": value for key, value in optimiser.state.get(parameter, {}).items()}


def restore_moments(
    name: str, parameter: Tensor, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give the optimiser what `moments` returned."""
    if f"adam.step.{name}" not in tensors:
        return
    saved = {key: tensors[f"adam.{key}.{name}"].to(parameter).clone() for key in MOMENTS}
    optimiser.state[parameter] = {"step": tensors[f"adam.step.{name}"].clone(), **saved}
