"""Common ground of all tests: one thread, so that sums come in one order, and no map of zeros unless a test asks for it."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*lru_cache.*:UserWarning:torch.*")


@pytest.fixture(autouse=True)
def _one_thread_and_grad() -> None:
    """A test that changed torch's state fails here and not in the next test."""
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
