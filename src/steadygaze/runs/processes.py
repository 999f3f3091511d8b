"""The processes that share a run, or a shard of it: those of `accelerate launch` or `torchrun`, or this one
alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from steadygaze.runs.shards.shard import WHOLE, Shard

LONGEST_WAIT = timedelta(days=30)  # a process may wait for a slower one at the end of a run


@dataclass(frozen=True)
class World:
    """Which process this is, of how many, and how they wait for one another.

    shard: the part of the run that these processes share
    """

    rank: int = 0
    size: int = 1
    local_main: bool = True
    device: torch.device | None = None
    wait: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    shard: Shard = WHOLE

    def owns(self, batch: int) -> bool:
        """Whether this process computes the batch of this number."""
        return self.shard.owns(batch) and batch // self.shard.count % self.size == self.rank

    @property
    def label(self) -> str:
        """In the names of this process's files: its number, after its shard."""
        return "-".join(filter(None, (self.shard.label, f"{self.rank:05d}")))

    def of_shard(self, shard: Shard) -> World:
        """These processes, sharing this part of a run."""
        return replace(self, shard=shard)


def world() -> World:
    """The world of this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
            warnings.warn(
                "accelerate launch --cpu starts a single process, whatever --num_processes is (it leaves "
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
