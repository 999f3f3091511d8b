"""The processes that share a run: those of `accelerate launch` or `torchrun`, or this one alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

LONGEST_WAIT = timedelta(days=30)  # a process may wait for a slower one at the end of a run


@dataclass(frozen=True)
class World:
    """Which process this is, of how many, and how they wait for one another."""

    rank: int = 0
    size: int = 1
    local_main: bool = True
    device: torch.device | None = None
    wait: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None

    def owns(self, batch: int) -> bool:
        """Whether this process computes the batch of this number."""
        return batch % self.size == self.rank


def world() -> World:
    """The world of this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
            warnings.warn(
                "accelerate launch --cpu starts a single process, whatever --num_processes says (it leaves "
                "that to "
                "MPI). On CPUs use accelerate launch --multi_gpu --num_processes 2 -m steadygaze ..., or "
                "torchrun.",
                stacklevel=2,
            )
        return World()
    from accelerate import PartialState

    forced_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    state = PartialState(cpu=forced_cpu or not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    return World(
        state.process_index,
        state.num_processes,
        state.is_local_main_process,
        state.device,
        state.wait_for_everyone,
        state.destroy_process_group,
    )
