"""Random numbers that follow from numbers such as (seed, step): a resumed run draws what an unbroken one
draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from steadygaze.seeding import combined_seed


@contextmanager
def seeded(*numbers: int, devices: bool = True) -> Iterator[None]:
    """Seed python, numpy and torch from `numbers` inside the block, and restore their states after it.

    devices: seed GPUs too. Not for single images: torch records a stack trace for each such call until a GPU
        is used
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - timm uses this one
    seed = combined_seed(*numbers)
    gpus = range(torch.cuda.device_count()) if devices and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
