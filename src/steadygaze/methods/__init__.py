"""Every attribution method, one file per family, each registered under its name.

`list_methods()` describes them, `register_method` adds one, `method(name, **options)` sets options.
"""

from steadygaze.methods.registry import (
    METHODS,
    Method,
    MethodInfo,
    aliases,
    base_methods,
    list_methods,
    method,
    parse_method,
    register_alias,
    register_method,
    rules_of,
    unavailable,
)

__all__ = [
    "METHODS",
    "Method",
    "MethodInfo",
    "aliases",
    "base_methods",
    "list_methods",
    "method",
    "parse_method",
    "register_alias",
    "register_method",
    "rules_of",
    "unavailable",
]
