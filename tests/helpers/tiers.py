"""Two tiers: `make test` runs the default one, `make test-all` also what is marked `full`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], default: Collection[Any] | int) -> list[Any]:
    """Parameters of a test: all but `default`, or all but the first few, are of the full tier.

    A tuple is the values of several arguments.
    """
    values = list(values)
    chosen = values[:default] if isinstance(default, int) else default
    assert all(value in values for value in chosen), f"{chosen}: expected some of {values}"

    def full(value: Any) -> Any:
        return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.full)

    return [value if value in chosen else full(value) for value in values]
