"""Which images make a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int

from steadygaze.errors import InputError
from steadygaze.seeding import combined_seed

Key = tuple[int, int]  # number of the augmented view (the epoch, unless images are repeated) and image index


@dataclass(frozen=True)
class StepSampler:
    """Which images each process loads at each step.

    The images of a step do not depend on the number of processes.

    Attributes:
        num_images: Number of images in the training set.
        batch_size: Images per step that the recipe asks for.
        accumulate: Micro-batches per step.
        rank: Index of this process.
        world_size: Number of processes.
        repeats: Augmented copies of an image in a row. They go to different parts of a step, as in the
            sampler of DeiT, and to the same part if there is one only.
    """

    num_images: int
    batch_size: int
    accumulate: int
    seed: int
    rank: int = 0
    world_size: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.step_size % (self.accumulate * self.world_size):
            raise InputError(
                f"a step of {self.step_size} images cannot be divided among {self.world_size} process(es) "
                f"and {self.accumulate} micro-batch(es): choose a multiple for batch, or another accumulate"
            )

    @property
    def step_size(self) -> int:
        """Images per step: `batch_size`, or all if there are fewer."""
        return min(self.batch_size, self.num_images)

    @property
    def micro_batch_size(self) -> int:
        """Images of one process in one accumulated part of a step."""
        return self.step_size // (self.accumulate * self.world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Full steps only; the rest of the images is left to other epochs, which have another order."""
        return self.num_images // self.step_size

    def micro_batches(self, step: int) -> list[list[Key]]:
        """The keys this process loads at a step, one list for each micro-batch."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.num_images, self.seed, epoch)
        positions = np.arange(step_in_epoch * self.step_size, (step_in_epoch + 1) * self.step_size)
        if self.repeats > 1:
            positions = positions.reshape(self.micro_batch_size, -1).T.flatten()
        size = self.micro_batch_size
        starts = [(part * self.world_size + self.rank) * size for part in range(self.accumulate)]
        return [[self._key(epoch, order, p) for p in positions[start : start + size]] for start in starts]

    def _key(self, epoch: int, order: Int[np.ndarray, " images"], position: int) -> Key:
        image, copy = divmod(position, self.repeats)
        return epoch * self.repeats + int(copy), int(order[image])


@lru_cache(maxsize=2)
def _epoch_order(num_images: int, seed: int, epoch: int) -> Int[np.ndarray, " images"]:
    return np.random.default_rng(combined_seed(seed, 0, epoch)).permutation(num_images)
