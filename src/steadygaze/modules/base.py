"""What every inserted module shares: it names itself in checkpoints, knows its cost, and works through hooks on its block.

An inserted module is a child of its block (`blocks.3.tap`), so that the block's own parameters keep their names. What it is
stands in the state dict as text, in bytes: `blocks.3.tap._extra_state`. Any way to save a state dict therefore saves it, and a
checkpoint says by itself which modules it needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import BadCheckpoint, BadInput, UnknownName

Allocation = str | tuple[int, ...]
ALLOCATIONS = ("all", "shallow", "deep")


@dataclass(frozen=True)
class Cost:
    """What modules add. multiply_adds: of convolutions, for one image. operations: those twice, and every sum and product beside."""

    parameters: int = 0
    multiply_adds: int = 0
    operations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.multiply_adds + other.multiply_adds,
            self.operations + other.operations,
        )


class Inserted(nn.Module):
    """A module that `insert` put into a block. `before` and `after` are its hooks on modules of that block."""

    mixes_tokens = True  # what `adapt` looks for: patches of such a model cannot be removed
    spec: dict[str, Any]  # what it is: options by name, with "module"

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Answer for the input of `module`, its first argument, whether it comes by position or by name."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self(kwargs[name])}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Answer for the output of `module`, or for the first one of several."""
        return self(output) if isinstance(output, Tensor) else (self(output[0]), *output[1:])

    def cost(self, tokens: int) -> Cost:
        """What it adds for one image of that many tokens."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(self.spec, sort_keys=True), "ascii"), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if decode(state) != self.spec:
            raise BadCheckpoint(
                f"the checkpoint has {told(decode(state))} where the model has {told(self.spec)}. Load it with "
                "steadygaze.load_model, or insert the module that it names."
            )


def decode(state: Tensor) -> dict[str, Any]:
    """The description that `get_extra_state` wrote."""
    return json.loads(bytes(state.cpu().to(torch.uint8).tolist()).decode("ascii"))


def told(spec: dict[str, Any]) -> str:
    """A description as a user would write it: CB(variant='plain', ...)."""
    return f"{spec['module']}({', '.join(f'{k}={v!r}' for k, v in spec.items() if k != 'module')})"


def checked_allocation(allocation: Any) -> Allocation:
    """ "all", "shallow", "deep", or the blocks as a tuple of numbers."""
    if isinstance(allocation, str):
        if allocation not in ALLOCATIONS:
            raise UnknownName("allocation", allocation, ALLOCATIONS, "Or give the numbers of the blocks.")
        return allocation
    numbers = tuple(allocation) if isinstance(allocation, Sequence) else None
    if not numbers or not all(isinstance(i, int) and not isinstance(i, bool) for i in numbers):
        known = ", ".join(ALLOCATIONS)
        raise BadInput(
            f"allocation: expected one of {known}, or the numbers of blocks such as (0, 1, 2), got {allocation!r}"
        )
    return numbers


def chosen_blocks(allocation: Allocation, depth: int) -> list[int]:
    """Blocks 0..depth−1 that get the module: shallow is the first half (of 5: 3), deep the rest; below zero counts from the end."""
    half = -(-depth // 2)
    if isinstance(allocation, str):
        return list({"all": range(depth), "shallow": range(half), "deep": range(half, depth)}[allocation])
    if not all(-depth <= i < depth for i in allocation):
        raise BadInput(f"allocation: expected blocks from 0 to {depth - 1}, got {list(allocation)}")
    return sorted({i % depth for i in allocation})
