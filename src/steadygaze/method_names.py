"""How a method's name is read, and what its options may be.

parse_method("attixg+plus:pairing=next,freeze=0.75")
make_method("attixg+plus", pairing="next", freeze=0.75)      # the same method
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from steadygaze.errors import BadInput, UnknownName
from steadygaze.method_registry import (
    AGGREGATORS,
    DEFAULT,
    METHODS,
    SYNONYMS,
    Aggregator,
    Alias,
    BaseMethod,
    Method,
    Options,
    allowed_options,
    base_methods,
    entry_of,
)


def parse_method(text: str) -> Method:
    """Read a method's name with options, as in `attixg+plus:pairing=next,freeze=0.75`.

    An unknown name, aggregator or option is an error that suggests the nearest known one.

    >>> method = parse_method("attixg+plus:pairing=next")
    >>> method.base.name, method.aggregator, method.given
    ('attixg', 'plus', (('pairing', 'next'),))
    """
    name, _, tail = text.strip().partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise BadInput(f"method {text!r}: expected options as key=value after the colon, got {item!r}")
        options[key.strip()] = _parse_value(value.strip())
    return make_method(name, **options)


def make_method(name: str, **options: Any) -> Method:
    """A method with options, all checked."""
    if ":" in name:
        parsed = parse_method(name)
        return make_method(parsed.stem, **(dict(parsed.given) | options))
    entry = entry_of(name)
    if isinstance(entry, Alias):
        target = parse_method(entry.target)
        method = make_method(target.stem, **(dict(target.options) | options))
        return replace(_named(method, name, options), score=entry.score)
    stem, plus, aggregator = name.partition("+")
    entry = entry_of(stem)
    if isinstance(entry, Alias):
        return _aggregated_alias(name, stem, aggregator, entry, options)
    if entry is None or (plus and name in SYNONYMS):  # "gradcam++" is no aggregation of gradcam
        raise UnknownName(
            "method", name if name in SYNONYMS else stem, METHODS, METHODS.hint, METHODS.synonyms
        )
    chosen = _aggregator_of(entry, aggregator if plus else None)
    options = _checked_options(name, entry, chosen, options)
    method = Method(name, entry, chosen, tuple(sorted(options.items())), entry.score)
    return _named(method, name, options)


def _named(method: Method, stem: str, given: Options) -> Method:
    """The method under the name that the user wrote."""
    return replace(method, name=join_name(stem, given), stem=stem, given=tuple(sorted(given.items())))


def _aggregated_alias(name: str, stem: str, aggregator: str, alias: Alias, options: dict[str, Any]) -> Method:
    """`gae+plus`: an alias of a bare base method can be aggregated, an alias of a pair cannot."""
    if isinstance(entry_of(alias.target), BaseMethod):
        return _named(make_method(f"{alias.target}+{aggregator}", **options), name, options)
    pair, colon, tail = alias.target.partition(":")
    other = f"{pair.partition('+')[0]}+{aggregator}{colon}{tail}"
    with_score = "" if alias.score == "logit" else f" with score={alias.score!r}"
    advice = f" Use {other!r}{with_score}." if aggregator in AGGREGATORS else ""
    raise BadInput(f"{name!r}: {stem!r} is an alias of {alias.target!r} and takes no aggregator.{advice}")


def _aggregator_of(base: BaseMethod, given: str | None) -> Aggregator | None:
    """The aggregator of a method: `given` after the plus sign, or what the bare name means."""
    if given is None:
        return base.aggregator
    if given not in AGGREGATORS:
        raise UnknownName("aggregator", given, AGGREGATORS)
    if base.kind == "model":
        raise BadInput(f"{base.name!r} has no layers, so {given!r} cannot aggregate it. Use the bare name.")
    if given == "rollout" and base.kind != "matrix":
        matrices = ", ".join(other.name for other in base_methods() if other.kind == "matrix")
        raise BadInput(
            f"rollout multiplies token-by-token matrices, and {base.name!r} gives one score per token. "
            f"It works with {matrices}."
        )
    return given  # type: ignore[return-value]  # one of AGGREGATORS


def join_name(name: str, options: Options) -> str:
    """A name with options, as `parse_method` reads it."""
    tail = ",".join(f"{key}={value}" for key, value in sorted(options.items()))
    return f"{name}:{tail}" if tail else name


def _parse_value(text: str) -> Any:
    """The value an option's text stands for: a number, true, false, none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _checked_options(
    name: str, base: BaseMethod, aggregator: Aggregator | None, options: dict[str, Any]
) -> dict[str, Any]:
    allowed = allowed_options(base, aggregator)
    checked = dict(options)
    for key in options:
        if key not in allowed:
            raise UnknownName(f"option of {name!r}", key, allowed)
        if checked[key] is None and isinstance(allowed[key], str):
            checked[key] = "none"  # the word "none", which was parsed as None
        _check_type(name, key, checked[key], allowed[key])
    _check_shared_options(name, checked)
    if base.check_options is not None:
        base.check_options(name, checked)
    return checked


def _check_type(name: str, key: str, value: Any, default: Any) -> None:
    """An option's value must have the type of its default."""
    types: dict[type, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        str: (str, "a word"),
        int: (int, "an integer"),
        float: ((int, float), "a number"),
    }
    expected, description = types.get(type(default), (object, ""))
    if not isinstance(value, expected) or (isinstance(value, bool) and type(default) in (int, float)):
        raise BadInput(f"{name}: expected {description} for {key}, for example {default!r}, got {value!r}")


def _check_shared_options(name: str, options: Options) -> None:
    """Options of rules and aggregators."""
    freeze = options.get("freeze")
    if freeze is not None and (isinstance(freeze, (bool, str)) or not 0 <= freeze <= 1):
        raise BadInput(
            f"{name}: freeze is the share of attention held constant, a number in 0..1, got {freeze!r}"
        )
    if options.get("slope", "origin") not in ("origin", "tangent"):
        raise UnknownName("slope", str(options["slope"]), ("origin", "tangent"))
    if options.get("gate", "held") not in ("held", "half"):
        raise UnknownName("gate", str(options["gate"]), ("held", "half"))
    if options.get("cut", "ceil") not in ("ceil", "floor"):
        raise UnknownName("cut", str(options["cut"]), ("ceil", "floor"))
    start = options.get("start")
    if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
        raise BadInput(f"{name}: start is the first layer, an integer >= 0, got {start!r}")


def given_methods(method: Any, methods: Any) -> Any:
    """The value of `method` or of its synonym `methods`, whichever was given."""
    if methods is None:
        return method
    if method != DEFAULT:
        raise BadInput(f"give either method or methods, got method={method!r} and methods={methods!r}")
    return [methods] if isinstance(methods, (str, Method)) else methods


def parse_methods(given: Any) -> dict[str, Method]:
    """The requested methods by the text they were requested with."""
    alone = isinstance(given, (str, Method)) or not isinstance(given, Iterable)
    several = [given] if alone else list(given)
    if not all(isinstance(m, (str, Method)) for m in several):
        raise BadInput(f"method: expected a name, a steadygaze.method(...) or a list of them, got {given!r}")
    if not several:
        raise BadInput("method: expected at least one method, got an empty list")
    return {str(m): m if isinstance(m, Method) else parse_method(m) for m in several}
