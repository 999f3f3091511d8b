"""Limits of the page: what one call may request, how long it may run, and how many calls may wait.

`Limits` are the numbers, `check_method` and `check_cost` compare a request with them, and `Calls` runs the
calls of all clients one after the other. A call that runs too long, or whose client has left, is stopped at
the next torch function that it calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any

from steadygaze.errors import BadInput
from steadygaze.method_registry import Method
from steadygaze.runs.cost.declared import forward_passes
from steadygaze.trace.intercept import Interception, TorchFunction

FILE_OPTION = "file"


@dataclass(frozen=True)
class Limits:
    """What a page allows.

    max_methods: methods in one call
    max_budget: forward passes of one method for one image; a backward pass counts as one
    max_cost: forward passes of all methods of one call together
    max_seconds: running time of one call, without the time that it waits for others
    max_upload_mb: size of an uploaded file, in megabytes
    max_calls_per_client: calls from one address that run or wait at the same time
    max_calls: calls from all addresses that run or wait at the same time
    """

    max_methods: int = 12
    max_budget: int = 2_000
    max_cost: int = 5_000
    max_seconds: float = 60.0
    max_upload_mb: float = 20.0
    max_calls_per_client: int = 4
    max_calls: int = 100

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise BadInput(f"{field.name}: expected a number > 0, got {value!r}", option=field.name)

    @property
    def max_upload_bytes(self) -> int:
        return int(self.max_upload_mb * 1_000_000)


DEFAULT_LIMITS = Limits()


class CallStopped(BadInput):
    """A call of the page that was stopped before it had finished."""


# -- what a call may request -----------------------------------------------------------------------------


def check_method(method: Method, limits: Limits) -> None:
    """`BadInput` if a visitor may not run this method."""
    if method.option(FILE_OPTION) is not None:
        raise BadInput(
            f"{method.stem}: the page does not read files that are named in options. Leave out {FILE_OPTION}."
        )
    cost = forward_passes(method)
    if cost > limits.max_budget:
        raise BadInput(
            f"{method.name}: expected at most {limits.max_budget:,} forward passes for one method, "
            f"got {cost:,.0f}. Use a smaller budget, or `steadygaze explain` on your own machine."
        )


def check_cost(methods: Iterable[Method], limits: Limits) -> None:
    """`BadInput` if these methods together cost more than one call may."""
    cost = sum(forward_passes(method) for method in methods)
    if cost > limits.max_cost:
        raise BadInput(
            f"expected methods of at most {limits.max_cost:,} forward passes in one call, got {cost:,.0f}. "
            "Choose fewer methods, or smaller budgets."
        )


# -- calls that run and wait -------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One call of a client. client: its address; session: its connection, None if it has none."""

    client: str
    session: str | None
    max_seconds: float
    stopped: bool = False
    deadline: float = float("inf")
    future: Future[Any] | None = None

    def execute(self, work: Callable[[], Any]) -> Any:
        """Run `work` in this thread, until it ends or the call is stopped."""
        self.deadline = monotonic() + self.max_seconds
        with _StopWatch(self):
            return work()

    def stop(self) -> None:
        """Let the call end: at once if it waits, at its next torch function if it runs."""
        self.stopped = True
        if self.future is not None:
            self.future.cancel()

    def check(self) -> None:
        """`CallStopped` if the call has to end."""
        if self.stopped:
            raise CallStopped("the call was cancelled")
        if monotonic() > self.deadline:
            raise CallStopped(
                f"cancelled after {self.max_seconds:g} seconds, the most that one call may take. "
                "Choose fewer methods, or smaller budgets."
            )


class Calls:
    """All calls of a page. They run one at a time, in the order in which they came: there is one model."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pending: set[Call] = set()
        self.worker = ThreadPoolExecutor(1, "steadygaze-page")

    async def run(self, work: Callable[[], Any], client: str, session: str | None) -> Any:
        """The result of `work`, run in the page's thread; `BadInput` if too many calls are waiting."""
        call = self._admit(client, session)
        try:
            call.future = self.worker.submit(copy_context().run, call.execute, work)
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            if call.stopped:  # by us, while it waited
                raise CallStopped("the call was cancelled") from None
            raise
        finally:
            call.stop()
            self.pending.discard(call)

    def leave(self, session: str) -> None:
        """Stop the calls of a client that has left."""
        for call in self.pending:
            if call.session == session:
                call.stop()

    def _admit(self, client: str, session: str | None) -> Call:
        limits = self.limits
        if len(self.pending) >= limits.max_calls:
            raise BadInput(f"the page is busy: {len(self.pending)} calls are waiting. Try again later.")
        if sum(call.client == client for call in self.pending) >= limits.max_calls_per_client:
            raise BadInput(
                f"expected at most {limits.max_calls_per_client} calls at the same time from one address, "
                "got one more. Wait for the others to finish."
            )
        call = Call(client, session, limits.max_seconds)
        self.pending.add(call)
        return call


class _StopWatch(Interception):
    """Checks before every torch function whether its call has to end."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.call.check()
        return super().__torch_function__(func, types, args, kwargs)
