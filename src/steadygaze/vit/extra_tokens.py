"""Tokens that a module adds to a model behind its prefix, and the plan of such a model.

In the model's own forward pass, hooks put the tokens in before the first block and take them out behind the
last one (`modules/registers.py`). In the view, `embed` adds them and `head` drops them, so that every block,
and every method, has them in its prefix; `tokens_are_there` keeps the hooks quiet meanwhile, in this thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import local
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.vit.view import Headless, Layout, Plan


class _Active(local):
    there: bool = False


_ACTIVE = _Active()


@contextmanager
def tokens_are_there() -> Iterator[None]:
    """While it lasts, the tokens of this thread have the added ones already."""
    before, _ACTIVE.there = _ACTIVE.there, True
    try:
        yield
    finally:
        _ACTIVE.there = before


def are_tokens_there() -> bool:
    """Whether the view runs a block in this thread."""
    return _ACTIVE.there


def add_tokens(x: Float[Tensor, "b n d"], prefix: int, count: int) -> Float[Tensor, "b m d"]:
    """`count` tokens of zeros behind the first `prefix` ones."""
    return torch.cat([x[:, :prefix], x.new_zeros(x.shape[0], count, x.shape[2]), x[:, prefix:]], dim=1)


def drop_tokens(x: Float[Tensor, "b m d"], prefix: int, count: int) -> Float[Tensor, "b n d"]:
    """The inverse of `add_tokens`."""
    return torch.cat([x[:, :prefix], x[:, prefix + count :]], dim=1)


def with_extra_tokens(plan: Plan, count: int) -> Plan:
    """The plan of the model with `count` tokens more in its prefix, which start as zeros."""
    prefix = plan.prefix

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        tokens, state, grid = plan.embed(images)
        return add_tokens(tokens, prefix, count), state, grid

    def head(x: Tensor, layout: Layout) -> Tensor:
        return plan.head(drop_tokens(x, prefix, count), layout)

    def quiet(call: Callable[[Tensor, Layout], Tensor]) -> Callable[[Tensor, Layout], Tensor]:
        def run(x: Tensor, layout: Layout) -> Tensor:
            with tokens_are_there():
                return call(x, layout)

        return run

    return replace(
        plan,
        embed=embed,
        blocks=[{**block, "call": quiet(block["call"])} for block in plan.blocks],
        head=plan.head if isinstance(plan.head, Headless) else head,
        prefix=prefix + count,
        added=count,
    )
