"""Explaining must not disturb: a model is put into evaluation for a while, and is afterwards as it was; compiled code steps aside.

Several threads may explain one model at once. What they share is switched on by the first of them and off by the last.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_LOCK = Lock()


class _Shared:
    """A state that the first of nested or concurrent users enters, and the last one leaves."""

    def __init__(self) -> None:
        self.users, self.state = 0, ExitStack()

    def enter(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        with _LOCK:
            if not self.users:
                self.state.enter_context(make())
            self.users += 1

    def leave(self) -> None:
        with _LOCK:
            self.users -= 1
            if not self.users:
                self.state.close()


_QUIET: "WeakKeyDictionary[nn.Module, _Shared]" = WeakKeyDictionary()
_EAGER = _Shared()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no parameter gradients inside; outside, also after an error, everything is as it was."""
    with _LOCK:
        shared = _QUIET.setdefault(model, _Shared())
    shared.enter(lambda: _evaluation(model))
    try:
        yield
    finally:
        shared.leave()


@contextmanager
def exactly(model: nn.Module) -> Iterator[None]:
    """In the model's own precision, and so that gradients can be taken: neither autocast nor inference mode."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.inference_mode(False), torch.autocast(device, enabled=False):
        yield


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = [m for m in model.modules() if m.training]
    wanted = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    try:
        for m in training:
            m.training = False
        for p in wanted:
            p.requires_grad_(False)
        yield
    finally:
        for m in training:
            m.training = True
        for p in wanted:
            p.requires_grad_(True)


class Interception(TorchFunctionMode):
    """A mode that answers some of torch's functions. Compiled modules run uncompiled inside it: what they call, no mode would see."""

    def __enter__(self) -> Self:
        if not torch.compiler.is_compiling():
            _EAGER.enter(lambda: torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if not torch.compiler.is_compiling():
            _EAGER.leave()
