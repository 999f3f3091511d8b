"""Limits of the page: what one call may request, how long it may run, and how many calls may wait.

`Limits` are the numbers, `check_method` and `check_cost` compare a request with them, and `Calls` runs the
calls of all clients one after the other. A call that runs too long, or whose client has left, is stopped at
the next torch function that it calls.

What the page's server checks in a request before gradio sees it (an ASGI middleware).

- The host name. A page for this machine only is no page for a web site whose name resolves to this machine
  (DNS rebinding), so that only LOCAL_HOSTS are served.
- The size of the body, while it arrives.
- Whether the client is still there: when the stream of its results breaks, its calls are stopped.

Serving the page within its limits, whoever launches it: `steadygaze app`, a script or a notebook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any
from urllib.parse import parse_qs

from steadygaze.errors import InputError
from steadygaze.methods.registry import Method, forward_passes
from steadygaze.vit.intercept import Interception, TorchFunction

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
                raise InputError(f"{field.name}: expected a number > 0, got {value!r}", option=field.name)

    @property
    def max_upload_bytes(self) -> int:
        return int(self.max_upload_mb * 1_000_000)


DEFAULT_LIMITS = Limits()


class CallStoppedError(InputError):
    """A call of the page that was stopped before it had finished."""


# -- what a call may request -----------------------------------------------------------------------------


def check_method(method: Method, limits: Limits) -> None:
    """`InputError` if a visitor may not run this method."""
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
    """`InputError` if these methods together cost more than one call may."""
    cost = sum(forward_passes(method) for method in methods)
    if cost > limits.max_cost:
        raise InputError(
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
        """`CallStoppedError` if the call has to end."""
        if self.stopped:
            raise CallStoppedError("the call was cancelled")
        if monotonic() > self.deadline:
            raise CallStoppedError(
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
        """The result of `work`, run in the page's thread; `InputError` if too many calls are waiting."""
        call = self._admit(client, session)
        try:
            call.future = self.worker.submit(copy_context().run, call.execute, work)
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            if call.stopped:  # by us, while it waited
                raise CallStoppedError("the call was cancelled") from None
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
            raise InputError(f"the page is busy: {len(self.pending)} calls are waiting. Try again later.")
        if sum(call.client == client for call in self.pending) >= limits.max_calls_per_client:
            raise InputError(
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


Message = MutableMapping[str, Any]

Receive = Callable[[], Awaitable[Message]]

Send = Callable[[Message], Awaitable[None]]

App = Callable[[Message, Receive, Send], Awaitable[None]]


LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")

MAX_JSON_BYTES = 1_000_000  # of a request that is no upload

MULTIPART_BYTES = 10_000  # what a form adds to the file in it


@dataclass(frozen=True)
class Guard:
    """The middleware.

    any_host: whether hosts other than this machine's own names are served, asked at every request
    max_upload: bytes of an uploaded file
    on_leave: called with the session of a client that has left
    """

    app: App
    any_host: Callable[[], bool]
    max_upload: int
    on_leave: Callable[[str], None]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = host_name(headers.get("host", ""))
        if host not in LOCAL_HOSTS and not self.any_host():
            served = ", ".join(LOCAL_HOSTS)
            await _refuse(send, 403, f"expected one of the hosts {served}, got {host!r}. Start with --host.")
            return
        exchange = _Exchange(receive, send, self._max_bytes(scope["path"]))
        try:
            exchange.check_size(int(headers.get("content-length") or 0))
            await self.app(scope, exchange.receive, exchange.send)
        except _BodyTooLarge as error:
            if not exchange.started:
                await _refuse(send, 413, str(error))
        finally:
            session = session_of(scope)
            if session is not None and (exchange.left or not exchange.finished):
                self.on_leave(session)

    def _max_bytes(self, path: str) -> int:
        is_upload = path.rstrip("/").endswith("/upload")
        return self.max_upload + MULTIPART_BYTES if is_upload else MAX_JSON_BYTES


def host_name(header: str) -> str:
    """The host of a Host header, without its port.

    >>> host_name("localhost:7860"), host_name("[::1]:7860"), host_name("[::1]")
    ('localhost', '[::1]', '[::1]')
    """
    name, bracket, _ = header.partition("]")
    return (name + bracket if bracket else header.partition(":")[0]).lower()


def session_of(scope: Message) -> str | None:
    """The session whose results this request streams; None if it is no such request.

    >>> session_of({"path": "/gradio_api/queue/data", "query_string": b"session_hash=abc"})
    'abc'
    >>> session_of({"path": "/gradio_api/call/explain/def"})
    'def'
    """
    parts = scope["path"].strip("/").split("/")
    if parts[-2:] == ["queue", "data"]:
        return parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
    return parts[-1] if len(parts) > 2 and parts[-3] == "call" else None


class _BodyTooLarge(Exception):
    pass


@dataclass
class _Exchange:
    """A request and its response: counts the bytes of the one, and sees how far the other has come.

    left: whether the client has closed the connection before the response was finished
    """

    source: Receive
    target: Send
    max_bytes: int
    received: int = 0
    started: bool = False
    finished: bool = False
    left: bool = False

    async def receive(self) -> Message:
        message = await self.source()
        self.left |= message["type"] == "http.disconnect" and not self.finished
        self.received += len(message.get("body", b""))
        self.check_size(self.received)
        return message

    async def send(self, message: Message) -> None:
        self.started = True
        await self.target(message)
        self.finished = message["type"] == "http.response.body" and not message.get("more_body")

    def check_size(self, size: int) -> None:
        if size > self.max_bytes:
            megabytes = self.max_bytes / 1_000_000
            raise _BodyTooLarge(f"expected at most {megabytes:.1f} MB, got more. Send a smaller image.")


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = reason.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
