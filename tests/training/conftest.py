"""Fixtures of the training tests."""

from pathlib import Path

import pytest

from helpers.training import image_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))
