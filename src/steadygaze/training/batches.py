"""Which pictures make a step, and how they are mixed (timm's mixup and cutmix)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from steadygaze.errors import BadInput
from steadygaze.training.data import seed_from
from steadygaze.training.recipe import Augment


@dataclass(frozen=True)
class Turns:
    """Which pictures each process takes at each step. A step's pictures do not depend on how many processes share them."""

    count: int
    batch: int
    accumulate: int
    seed: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.size % (self.accumulate * self.world):
            raise BadInput(
                f"a step of {self.size} pictures cannot be shared by {self.world} process(es) in {self.accumulate} piece(s): "
                "give a multiple, batch or accumulate"
            )

    @property
    def size(self) -> int:
        """Pictures of one step: fewer than `batch` only where there are not so many."""
        return min(self.batch, self.count)

    @property
    def steps(self) -> int:
        """Steps of an epoch; a rest that does not fill a batch is left for another epoch's order."""
        return self.count // self.size

    def pieces(self, step: int) -> list[list[tuple[int, int]]]:
        """The (epoch, place) keys of this process at a step, one list for each accumulated piece."""
        epoch, place = divmod(step, self.steps)
        order = self._order(epoch)[place * self.size : (place + 1) * self.size]
        one = self.size // (self.accumulate * self.world)
        starts = [(piece * self.world + self.rank) * one for piece in range(self.accumulate)]
        return [[(epoch, int(i)) for i in order[start : start + one]] for start in starts]

    def _order(self, epoch: int) -> np.ndarray:
        known: dict[int, np.ndarray] = self.__dict__.setdefault("_orders", {})
        if epoch not in known:
            known.clear()
            known[epoch] = np.random.default_rng(seed_from(self.seed, 0, epoch)).permutation(self.count)
        return known[epoch]

    def upcoming(self, step: int, stop: int) -> Iterator[list[tuple[int, int]]]:
        """The keys of every piece from a step on, for a loader."""
        for number in range(step, stop):
            yield from self.pieces(number)


def mixer(augment: Augment, classes: int, smoothing: float) -> Any:
    """timm's mixup and cutmix; None where neither is asked for."""
    if not (augment.mixup or augment.cutmix):
        return None
    from timm.data import Mixup

    return Mixup(mixup_alpha=augment.mixup, cutmix_alpha=augment.cutmix, prob=augment.mix_probability, switch_prob=augment.switch,
                 label_smoothing=smoothing, num_classes=classes)  # fmt: skip
