"""From the names and options that a user gives to suites, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadygaze.errors import BadInput, UnknownName
from steadygaze.runs.stress.suite import SUITES, Suite, all_options


def parse_suites(texts: str | Sequence[str], options: Mapping[str, Any] | None = None) -> list[Suite]:
    """The suites that these texts name, comma-separated, in the order of the registry.

    options: by name, as the user gave them; None stands for the default. All are checked, used or not.

    >>> [suite.name for suite in parse_suites("corruptions,shift:imagenet-a=folder")]
    ['corruptions', 'shift']
    """
    arguments = _arguments([texts] if isinstance(texts, str) else texts)
    values = parse_options(options or {})
    suites = []
    for name in SUITES:
        if name in arguments:
            suite = SUITES[name](arguments[name], **values)
            suite.check()
            suites.append(suite)
    if not suites:
        raise BadInput(f"suites: expected at least one of {', '.join(SUITES)}, got none", option="suites")
    alone = next((suite.name for suite in suites if suite.label_maps), None)
    if alone and len(suites) > 1:
        raise BadInput(
            f"{alone}: is measured on a segmenter, every other suite on a classifier. Run it alone.",
            option="suites",
        )
    _check_served(values, suites)
    return suites


def _arguments(texts: Sequence[str]) -> dict[str, list[str]]:
    """suite -> what stood after its colon, each time it was named."""
    arguments: dict[str, list[str]] = {}
    for text in texts:
        for piece in filter(None, (piece.strip() for piece in str(text).split(","))):
            name, colon, argument = piece.partition(":")
            suite = SUITES[name]
            given = arguments.setdefault(suite.name, [])
            if colon:
                given.append(argument)
    return arguments


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values of the options that were given."""
    known = all_options()
    values = {}
    for name, given in options.items():
        if name not in known:
            raise UnknownName("option of a suite", name, known)
        if given is not None:
            try:
                values[name] = known[name].parse(given)
            except BadInput as error:
                error.option = error.option or name
                raise
    return values


def _check_served(values: Mapping[str, Any], suites: Sequence[Suite]) -> None:
    """Options that may not be given in vain."""
    used = {option.name for suite in suites for option in suite.options}
    known = all_options()
    for name in values:
        if name not in used and known[name].must_serve:
            owners = [suite.name for suite in SUITES.values() if known[name] in suite.options]
            raise BadInput(
                f"{name}: an option of the suite {', '.join(owners)}, which is not among the suites",
                option=name,
            )
