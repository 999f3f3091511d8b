"""Fixtures of the training tests."""

from pathlib import Path

import pytest

from helpers.training import pictures


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))
