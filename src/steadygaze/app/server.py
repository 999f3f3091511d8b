"""Serving the page within its limits, whoever launches it: `steadygaze app`, a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from steadygaze.app.limits import Calls, Guard

CSS = (files(__package__) / "page.css").read_text(encoding="utf-8")

CLEAN_EVERY, KEEP_FILES = 60, 3600  # seconds: uploads and results older than the second are deleted


def guard(blocks: gr.Blocks, calls: Calls) -> None:
    """Let `blocks.launch()` serve the page behind a `Guard`, and refuse to download images."""
    limits, launch, preprocess_data = calls.limits, blocks.launch, blocks.preprocess_data

    def guarded_launch(**options: Any) -> Any:
        public = bool(options.get("server_name") or os.environ.get("GRADIO_SERVER_NAME"))
        middleware = Middleware(
            Guard,
            any_host=lambda: public or bool(blocks.share),
            max_upload=limits.max_upload_bytes,
            on_leave=calls.leave,
        )
        app_options = dict(options.pop("app_kwargs", None) or {})
        app_options["middleware"] = [*app_options.get("middleware", ()), middleware]
        # a call that waits in `Calls` occupies one of gradio's threads
        options.setdefault("max_threads", limits.max_calls + 10)
        options.setdefault("max_file_size", limits.max_upload_bytes)
        options["css"] = "\n".join(part for part in (CSS, options.get("css")) if part)
        return launch(**options, app_kwargs=app_options)

    async def without_links(block_fn: Any, inputs: list[Any], *more: Any, **options: Any) -> Any:
        if any(path.startswith(("http:", "https:")) for path in file_paths(inputs)):
            raise gr.Error("expected an uploaded image file, got a link: download it and upload the file")
        return await preprocess_data(block_fn, inputs, *more, **options)

    blocks.launch = guarded_launch
    blocks.preprocess_data = without_links
    blocks.queue(api_open=False, default_concurrency_limit=None, max_size=limits.max_calls)


def file_paths(value: Any) -> Iterator[str]:
    """The paths of all files in a value of a component."""
    if isinstance(value, dict):
        if isinstance(value.get("path"), str):
            yield value["path"].strip().lower()
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from file_paths(entry)
