"""Limits of the page: what one call may request, how many calls may wait, and how long one may run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any

from steadygaze.errors import InputError
from steadygaze.methods.registry import Method, forward_passes
from steadygaze.vit.intercept import Interception, TorchFunction

FILE_OPTION = "file"


@dataclass(frozen=True)
class Limits:
    """What a page allows.

    Args:
        max_methods (int): number of methods per call.
        max_budget (int): forward passes of one method for one image; a backward pass counts as one.
        max_cost (int): forward passes of all methods of one call.
        max_seconds (float): running time of one call, without the time that it waits for others.
        max_upload_mb (float): size of an uploaded file, in megabytes.
        max_stored_mb (float): size of all uploads and results together, in megabytes; the oldest are deleted.
        max_calls (int): number of waiting calls; further ones are refused.
    """

    max_methods: int = 12
    max_budget: int = 2_000
    max_cost: int = 5_000
    max_seconds: float = 60.0
    max_upload_mb: float = 20.0
    max_stored_mb: float = 1000.0
    max_calls: int = 100

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise InputError(f"{field.name}: expected a number > 0, got {value!r}", option=field.name)

    @property
    def max_upload_bytes(self) -> int:
        return int(self.max_upload_mb * 1_000_000)

    @property
    def max_stored_bytes(self) -> int:
        return int(self.max_stored_mb * 1_000_000)


DEFAULT_LIMITS = Limits()


class CallStoppedError(InputError):
    """A call of the page that was stopped before it had finished."""


def check_method(method: Method, limits: Limits) -> None:
    """Raise `InputError` if a visitor may not run this method."""
    if method.option(FILE_OPTION) is not None:
        raise InputError(
            f"{method.stem}: the page does not read files that are named in options. Leave out {FILE_OPTION}."
        )
    cost = forward_passes(method)
    if cost > limits.max_budget:
        raise InputError(
            f"{method.name}: expected at most {limits.max_budget:,} forward passes for one method, "
            f"got {cost:,.0f}. Use a smaller budget, or `steadygaze explain` on your own machine."
        )


def check_cost(methods: Iterable[Method], limits: Limits) -> None:
    """Raise `InputError` if these methods together cost more than one call may."""
    cost = sum(forward_passes(method) for method in methods)
    if cost > limits.max_cost:
        raise InputError(
            f"expected methods of at most {limits.max_cost:,} forward passes in one call, got {cost:,.0f}. "
            "Choose fewer methods, or smaller budgets."
        )


class StopWatch(Interception):
    """Ends the work in its context: at the next torch function after its time is up or its client has left.

    Args:
        max_seconds (float): time from the start of the context.
        is_connected (Callable[[], bool]): whether the client still waits for the result.

    Raises:
        CallStoppedError: from the torch function at which the work ends.
    """

    def __init__(self, max_seconds: float, is_connected: Callable[[], bool]) -> None:
        super().__init__()
        self.max_seconds, self.is_connected = max_seconds, is_connected
        self.deadline = monotonic() + max_seconds

    def __torch_function__(self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_connected():
            raise CallStoppedError("the call was cancelled")
        if monotonic() > self.deadline:
            raise CallStoppedError(
                f"cancelled after {self.max_seconds:g} seconds, the limit of one call. "
                "Choose fewer methods, or smaller budgets."
            )
        return super().__torch_function__(func, types, args, kwargs)
