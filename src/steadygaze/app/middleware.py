"""What the page's server checks in a request before gradio sees it (an ASGI middleware).

- The host name. A page for this machine only is no page for a web site whose name resolves to this machine
  (DNS rebinding), so that only LOCAL_HOSTS are served.
- The size of the body, while it arrives.
- Whether the client is still there: when the stream of its results breaks, its calls are stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

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
