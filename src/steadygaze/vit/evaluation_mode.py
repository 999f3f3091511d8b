"""Contexts in which a model is run without leaving a trace on it.

Several threads may run one model at once: what they share is switched on by the first and off by the last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from steadygaze.trace.intercept import SharedState

_LOCK = Lock()
_STATES: "WeakKeyDictionary[nn.Module, SharedState]" = WeakKeyDictionary()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients for parameters; afterwards, also after an error, all is as it was."""
    with _LOCK:
        state = _STATES.setdefault(model, SharedState())
    state.enter(lambda: _switched(model))
    try:
        yield
    finally:
        state.leave()


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
