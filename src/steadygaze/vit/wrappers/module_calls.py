"""Answering the calls of some modules in place of the modules, in one thread, for as long as a context lasts.

    with answered({block: answer}):
        model(images)               # where the model calls `block`, answer(call, args, kwargs) runs instead

`call` is the module's own call. Other threads that run the same model are not affected: what is installed
on a module is shared, and answers only in threads that asked for it; the last user removes it. Hooks of an
answered module run only if the answer calls the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

from torch import nn

Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
SLOT = "_compiled_call_impl"  # nn.Module.__call__ looks here first; copies and pickles leave it out

_LOCK = Lock()
_USERS: dict[int, int] = {}  # id of a module -> contexts that answer it, in all threads
_BEFORE: dict[int, Any] = {}  # id of a module -> what its slot held


class _Active(local):
    """The answers of this thread, by id of the module."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}


_ACTIVE = _Active()


@contextmanager
def answered(answers: Mapping[nn.Module, Answer]) -> Iterator[None]:
    """Let `answers` answer the calls of their modules in this thread."""
    modules = list(answers)
    with _LOCK:
        for module in modules:
            _install(module)
    before = _ACTIVE.answers
    _ACTIVE.answers = {**before, **{id(module): answer for module, answer in answers.items()}}
    try:
        yield
    finally:
        _ACTIVE.answers = before
        with _LOCK:
            for module in modules:
                _remove(module)


def _install(module: nn.Module) -> None:
    key = id(module)
    _USERS[key] = _USERS.get(key, 0) + 1
    if _USERS[key] > 1:
        return
    slot = vars(module)
    if SLOT in slot:
        _BEFORE[key] = slot[SLOT]  # of model.compile()
    original = slot.get(SLOT) or module._call_impl

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        answer = _ACTIVE.answers.get(key)
        return original(*args, **kwargs) if answer is None else answer(original, args, kwargs)

    slot[SLOT] = dispatch


def _remove(module: nn.Module) -> None:
    key = id(module)
    _USERS[key] -= 1
    if _USERS[key]:
        return
    del _USERS[key], vars(module)[SLOT]
    if key in _BEFORE:
        vars(module)[SLOT] = _BEFORE.pop(key)
