"""The examples in docstrings run and print what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"


def modules_with_examples() -> dict[str, int]:
    """Module name -> number of examples.

    Examples are found in the text, so that modules without any, some of which need optional extras, are not
    imported.
    """
    counts = {path: path.read_text(encoding="utf-8").count(">>> ") for path in sorted(SOURCE.rglob("*.py"))}
    names = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in counts}
    return {names[path].removesuffix(".__init__"): count for path, count in counts.items() if count}


@pytest.mark.parametrize(("name", "count"), modules_with_examples().items())
def test_examples_of_a_module(name: str, count: int) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted == count
    assert result.failed == 0  # the captured output shows expected and actual values
