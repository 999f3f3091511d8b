"""What the server of the page refuses before a request reaches the page, and how much it stores.

| request | answer |
| --- | --- |
| for a host name that is not of this machine (DNS rebinding) | 400 |
| from a page of another web site (`Origin`) | 403 |
| of a function that the page does not have | 404 |
| with too large a body | 413, while it arrives |
| an upload while too many others arrive | 503 |

Uploads and results are stored in a folder of the page. Before a request is served, the oldest of them are
deleted until all files together are within `Limits.max_stored_mb`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadygaze.app.limits import Limits

LOCAL_HOSTS = ["localhost", "127.0.0.1", "[::1]"]
REQUEST_BYTES = 1_000_000  # of a request, besides an uploaded file
FOLDER = "GRADIO_TEMP_DIR"  # the environment variable by which gradio finds its folder
MAX_FILES = 2_000  # that are stored


class LocalHosts(TrustedHostMiddleware):
    """Serves this machine's own names only, against DNS rebinding, unless gradio shares the page."""

    def __init__(self, app: ASGIApp, blocks: gr.Blocks) -> None:
        super().__init__(app, LOCAL_HOSTS)
        self.blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.allow_any = bool(self.blocks.share)
        await super().__call__(scope, receive, send)


class OwnOrigin:
    """Refuses requests that a browser sends for a page of another web site.

    Browsers name that page in `Origin`, and a page cannot change it. gradio would answer such a request, and
    leave it to the browser to hide the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else Headers()
        origin = headers.get("origin")
        own = {headers.get(name, "").lower() for name in ("host", "x-forwarded-host")}
        if origin is not None and (not _site(origin) or _site(origin) not in own):
            response = PlainTextResponse("expected a request of this page, got one of another site", 403)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _site(origin: str) -> str:
    """Host and port of an origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class BodyLimit:
    """Refuses a request whose body is too large, while it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, f"expected at most {self.max_bytes / 1e6:.1f} MB, got more")
            return message

        await self.app(scope, limited, send)


class Storage:
    """Bounds the files of the page: uploads, also those that were broken off, and results.

    Args:
        keep (float): seconds after which a file is deleted in any case.
        folder (TemporaryDirectory): of `own_folder`.
    """

    def __init__(
        self, app: ASGIApp, blocks: gr.Blocks, limits: Limits, keep: float, folder: TemporaryDirectory[str]
    ) -> None:
        self.app, self.blocks, self.limits, self.keep, self.folder = app, blocks, limits, keep, folder
        self.arriving = 0  # bytes that the uploads of this moment may have

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["app"].uploaded_file_dir = self.folder.name
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        size = 0
        if scope["path"].rstrip("/").endswith("/upload"):
            size = self.limits.max_upload_bytes + REQUEST_BYTES
        if size and self.arriving + size > max(self.limits.max_stored_bytes, size):
            response = PlainTextResponse("too many uploads at the same time: try again", 503)
            await response(scope, receive, send)
            return
        self.arriving += size
        try:
            self.make_room()
            await self.app(scope, receive, send)
        finally:
            self.arriving -= size

    def make_room(self) -> None:
        """Delete the oldest files until the others and those that arrive are within the limit."""
        kept = {
            str(file)
            for component in self.blocks.blocks.values()
            for file in getattr(component, "keep_in_cache", ())
        }
        names = {entry.path for entry in _files_below(self.folder.name)} - kept
        files = []
        for name in names:
            with suppress(OSError):
                status = Path(name).stat()
                files.append((status.st_mtime, status.st_size, name))
        total, count = sum(size for _, size, _ in files), len(files)
        for changed, size, name in sorted(files):
            within = total + self.arriving <= self.limits.max_stored_bytes and count <= MAX_FILES
            if within and time.time() - changed <= self.keep:
                break
            with suppress(OSError):
                Path(name).unlink()
            total, count = total - size, count - 1


def _files_below(folder: str) -> Iterator[os.DirEntry[str]]:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            files = list(_files_below(entry.path))
            yield from files
            if not files:  # gradio makes a folder for each upload
                with suppress(OSError):
                    Path(entry.path).rmdir()
        else:
            yield entry


async def unknown_function(request: Request, error: Exception) -> Response:
    """Answer a call of a function that is not there: gradio looks it up without a check."""
    return PlainTextResponse(f"the page has no such function: {str(error)[:200]}", 404)


@contextmanager
def own_folder() -> Iterator[TemporaryDirectory[str]]:
    """A folder for the files of the page that is built in this context, below that of gradio, which may hold
    the files of other pages.
    """
    above = Path(get_upload_folder())  # gradio accepts files below this folder only
    above.mkdir(parents=True, exist_ok=True)
    folder = TemporaryDirectory(prefix="page-", dir=above, ignore_cleanup_errors=True)
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = folder.name  # components read it when they are made
    try:
        yield folder
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


def guard(blocks: gr.Blocks, limits: Limits, css: str, keep: float, folder: TemporaryDirectory[str]) -> None:
    """Let `blocks.launch()` serve the page within its limits, and refuse to download images.

    Args:
        css: Of the page.
        keep: Seconds after which files are deleted.
        folder: Of `own_folder`.
    """
    launch, preprocess_data = blocks.launch, blocks.preprocess_data

    def guarded_launch(**options: Any) -> Any:
        middleware = [
            Middleware(OwnOrigin),
            Middleware(BodyLimit, max_bytes=limits.max_upload_bytes + REQUEST_BYTES),
            Middleware(Storage, blocks=blocks, limits=limits, keep=keep, folder=folder),
        ]
        if not (options.get("server_name") or os.environ.get("GRADIO_SERVER_NAME")):
            middleware.append(Middleware(LocalHosts, blocks=blocks))
        app_options = dict(options.pop("app_kwargs", None) or {})
        app_options["middleware"] = [*app_options.get("middleware", ()), *middleware]
        unknown = {KeyError: unknown_function, FnIndexInferError: unknown_function}
        app_options["exception_handlers"] = {**unknown, **app_options.get("exception_handlers", {})}
        options.setdefault("max_file_size", limits.max_upload_bytes)
        options["css"] = "\n".join(part for part in (css, options.get("css")) if part)
        return launch(**options, app_kwargs=app_options)

    async def without_links(block_fn: Any, inputs: list[Any], *more: Any, **options: Any) -> Any:
        if any(path.startswith(("http:", "https:")) for path in file_paths(inputs)):
            raise gr.Error("expected an uploaded image file, got a link: download it and upload the file")
        return await preprocess_data(block_fn, inputs, *more, **options)

    blocks.launch = guarded_launch
    blocks.preprocess_data = without_links
    # api_open=False: a call that does not go through the queue is refused
    blocks.queue(api_open=False, max_size=limits.max_calls)


def file_paths(value: Any) -> Iterator[str]:
    """Yield the paths of all files in a value of a component."""
    if isinstance(value, dict):
        if isinstance(value.get("path"), str):
            yield value["path"].strip().lower()
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from file_paths(entry)
