"""Contexts in which a model is run without leaving a trace on it, also by several threads at once.

What threads share (mode, gradients of the weights) is switched on by the first and off by the last. A thread
that changes the mode or the weights of the model meanwhile keeps its change, and the calls that it disturbed
raise `ModelChangedError`. Two changes cannot be seen and are undone with it: a `model.eval()` or
`requires_grad_(False)` of what is in that state already. A thread that runs a model in training mode with
gradients, while another one holds it in evaluation mode, gets `ModelChangedError` too: its dropout would be
off, and its backward pass would find no gradient.

`answered` runs a function in place of a module's call, in one thread, as long as the context lasts:

    with answered({block: answer}):
        model(images)               # where the model calls `block`, answer(call, args, kwargs) runs instead

`call` is the module's own call. Other threads that run the same model are not affected: what is installed
on a module is shared, and answers only in threads that asked for it; the last user removes it. Hooks of an
answered module run only if the answer calls the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, get_ident, local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from steadygaze.errors import BrokenMapError, ModelChangedError
from steadygaze.vit.intercept import SharedState

_LOCK = Lock()
_STATES: "WeakKeyDictionary[nn.Module, SharedState]" = WeakKeyDictionary()
_THREADS: "WeakKeyDictionary[nn.Module, list[int]]" = WeakKeyDictionary()  # that hold a model, once a context


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients for parameters; afterwards, also after an error, all is as it was.

    Raises `ModelChangedError` if another thread put the model into training mode meanwhile; it stays in it.
    """
    with _LOCK:
        state = _STATES.setdefault(model, SharedState())
        threads = _THREADS.setdefault(model, [])
        threads.append(get_ident())
    changed = False
    try:
        state.enter(lambda: _switched(model))
        try:
            yield
        finally:
            changed = any(module.training for module in model.modules())
            state.leave()
    finally:
        with _LOCK:
            threads.remove(get_ident())
    if changed:
        raise ModelChangedError(
            "another thread put the model into training mode during this call, so the result would be of "
            "both modes. It stays in training mode; call again when it is not being trained, or use a copy."
        )


@contextmanager
def constant_weights(model: nn.Module) -> Iterator[None]:
    """Raise `ModelChangedError` if another thread changes parameters or buffers, as an optimizer does.

    Changes through `parameter.data` are seen only if they replace the tensor.
    """
    before = _versions(model)
    try:
        yield
    except (RuntimeError, BrokenMapError) as error:  # autograd refuses tensors that were changed in place
        if _versions(model) != before:
            raise ModelChangedError(WEIGHTS_CHANGED) from error
        raise
    if _versions(model) != before:
        raise ModelChangedError(WEIGHTS_CHANGED)


WEIGHTS_CHANGED = (
    "another thread changed the model's weights during this call, so the result would be of both models. "
    "Call again when it is not being trained, or use a copy of it."
)


def _versions(model: nn.Module) -> list[tuple[int, int, int]]:
    tensors = (*model.parameters(), *model.buffers())
    return [(id(t), t.data_ptr(), t._version) for t in tensors if _has_version(t)]


def _has_version(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_inference()


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """The model's own precision, and gradients possible: neither autocast nor inference mode."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.inference_mode(False), torch.autocast(device, enabled=False):
        yield


@contextmanager
def _switched(model: nn.Module) -> Iterator[None]:
    training = [m for m in model.modules() if m.training]
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    in_training = model.training and bool(trained) and not isinstance(model, torch.jit.ScriptModule)
    guard = model.register_forward_pre_hook(_refuse_training) if in_training else None
    try:
        for module in training:
            module.training = False
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        if guard is not None:
            guard.remove()
        for module in training:
            module.training = True
        for parameter in trained:
            parameter.requires_grad_(True)


def _refuse_training(model: nn.Module, args: object) -> None:
    if torch.is_grad_enabled() and get_ident() not in _THREADS.get(model, [get_ident()]):
        raise ModelChangedError(
            "another thread explains or measures this model, which holds it in evaluation mode without "
            "gradients of its weights: a training step now would be wrong. Explain a copy of it "
            "(copy.deepcopy(model)), or take turns."
        )


Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
SLOT = "_compiled_call_impl"  # nn.Module.__call__ looks here first; copies and pickles leave it out

_CALLS_LOCK = Lock()
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
    with _CALLS_LOCK:
        for module in modules:
            _install(module)
    before = _ACTIVE.answers
    _ACTIVE.answers = {**before, **{id(module): answer for module, answer in answers.items()}}
    try:
        yield
    finally:
        _ACTIVE.answers = before
        with _CALLS_LOCK:
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
