"""Tests in a browser run only if they are asked for: they are slow, and need a browser."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "browser" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("browser") is not None:
            item.add_marker(pytest.mark.skip(reason="drives a browser: `make test-browser`, or -m browser"))
