"""Two tiers: `make test` runs the default one, `make test-all` also what is marked `full`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], default: Collection[Any] | int) -> list[Any]:
    """Parameters of a test: all but `default`, or all but the first few, are of the full tier."""
    values = list(values)
    chosen = values[:default] if isinstance(default, int) else default
    assert all(v in values for v in chosen), f"{chosen}: expected some of {values}"
    return [v if v in chosen else pytest.param(v, marks=pytest.mark.full) for v in values]
