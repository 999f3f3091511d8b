"""Common to all tests: one thread, no terminal width, and no test may leave torch in another state."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import shapecheck
import torch
from hypothesis import settings

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 20)  # millions of objects are imported, and looked through each time
settings.register_profile("few", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=25, deadline=None, derandomize=True)  # `make test-all`
settings.load_profile("few")
os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe, whatever the terminal that runs the tests


def pytest_addoption(parser: pytest.Parser) -> None:
    rooms = "packages whose arrays are checked against the annotations"
    parser.addoption("--shapes", choices=("default", "all", "none"), default="default", help=rooms)


def pytest_configure(config: pytest.Config) -> None:
    rooms = {"default": shapecheck.DEFAULT_ROOMS, "all": shapecheck.ALL_ROOMS, "none": ()}
    shapecheck.install(rooms[config.getoption("--shapes")])


FULL_TIER = {
    line
    for line in (Path(__file__).parent / "full_tier.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
}
WHOLE_SUITE = 4000  # tests; with fewer, some were not asked for, and a listed one may be missing


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of full_tier.txt; one that does not exist is an error."""
    names: set[str] = set()
    for item in items:
        both = {item.nodeid, item.nodeid.partition("[")[0]}
        names |= both
        if both & FULL_TIER:
            item.add_marker(pytest.mark.full)
    if len(items) > WHOLE_SUITE and FULL_TIER - names:
        raise pytest.UsageError(f"tests/full_tier.txt: no such tests: {sorted(FULL_TIER - names)}")


@pytest.fixture(autouse=True)
def _torch_is_left_alone() -> Iterator[None]:
    """A test that leaves a mode of torch switched fails itself, and does not spoil the next one."""
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float32
