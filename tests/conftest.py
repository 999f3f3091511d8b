"""Common to all tests: one thread, no terminal width, and no test may leave torch in another state."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("few", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=25, deadline=None, derandomize=True)  # `make test-all`
settings.load_profile("few")
os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe, whatever the terminal that runs the tests


@pytest.fixture(autouse=True)
def _torch_is_left_alone() -> Iterator[None]:
    """A test that leaves a mode of torch switched fails itself, and does not spoil the next one."""
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float32
