"""Contexts in which a model is run without leaving a trace on it.

Several threads may run one model at once: what they share is switched on by the first and off by the last.
A thread that changes the mode or the weights of the model meanwhile keeps its change, and the calls that it
disturbed raise `ModelChanged`. Two changes cannot be seen: `model.eval()` and `requires_grad_(False)` set
what is set already, and are undone with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from steadygaze.errors import BrokenMap, ModelChanged
from steadygaze.trace.intercept import SharedState

_LOCK = Lock()
_STATES: "WeakKeyDictionary[nn.Module, SharedState]" = WeakKeyDictionary()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients for parameters; afterwards, also after an error, all is as it was.

    Raises `ModelChanged` if another thread put the model into training mode meanwhile; it stays in it.
    """
    with _LOCK:
        state = _STATES.setdefault(model, SharedState())
    state.enter(lambda: _switched(model))
    changed = False
    try:
        yield
    finally:
        changed = any(module.training for module in model.modules())
        state.leave()
    if changed:
        raise ModelChanged(
            "another thread put the model into training mode during this call, so the result would be of "
            "both modes. It stays in training mode; call again when it is not being trained, or use a copy."
        )


@contextmanager
def constant_weights(model: nn.Module) -> Iterator[None]:
    """Raises `ModelChanged` if another thread changes parameters or buffers meanwhile, such as an
    optimiser's step. Changes through `parameter.data` are seen only if they replace the tensor.
    """
    before = _versions(model)
    try:
        yield
    except (RuntimeError, BrokenMap) as error:  # autograd refuses tensors that were changed in place
        if _versions(model) != before:
            raise ModelChanged(WEIGHTS_CHANGED) from error
        raise
    if _versions(model) != before:
        raise ModelChanged(WEIGHTS_CHANGED)


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
    try:
        for module in training:
            module.training = False
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in trained:
            parameter.requires_grad_(True)
