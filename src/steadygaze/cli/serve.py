"""`steadygaze app`: serves the interactive page until it is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import torch
from rich.console import Console

from steadygaze.app import Limits, page
from steadygaze.cli.output import print_line
from steadygaze.errors import InputError
from steadygaze.loading.load import load_model
from steadygaze.questions.text import TextClasses

UPLOADS = "GRADIO_TEMP_DIR"  # the environment variable by which gradio finds its folder


def run(
    model: str,
    checkpoint: Path | None,
    num_classes: int | None,
    diffmask: Path | None,
    shapley: Path | None,
    device: str,
    host: str | None,
    port: int,
    open_browser: bool,
    limits: Limits,
    *,
    model_options: Mapping[str, Any] | None = None,
    task: str | None = None,
    trust_remote_code: bool = False,
    words: TextClasses | None = None,
) -> int:
    """Load the model and serve its page until Ctrl-C or SIGTERM; returns the exit code."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(
        model,
        checkpoint,
        num_classes=num_classes,
        device=device,
        **(model_options or {}),
        task=task,
        trust_remote_code=trust_remote_code,
    )
    loaded = loaded if words is None else words.applied(loaded)  # without words, the page has a box for them
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), temporary_uploads():
        blocks = page(loaded, diffmask, shapley=shapley, limits=limits)
        try:
            _, address, _ = blocks.launch(
                server_name=host,
                server_port=port,
                inbrowser=open_browser,
                quiet=True,
                prevent_thread_lock=True,
            )
        except OSError as error:
            raise InputError(
                f"cannot bind {host or 'localhost'}:{port}: {error}. Choose another port.", option="port"
            ) from error
        print_line(Console(), f"serving at {address} (press Ctrl-C to stop)")
        try:
            Event().wait()
        finally:
            blocks.close(verbose=False)
    return 0


@contextmanager
def temporary_uploads() -> Iterator[None]:
    """Let gradio store uploads and results in a folder that is deleted at the end."""
    with TemporaryDirectory(prefix="steadygaze-app-") as folder:
        os.environ[UPLOADS] = folder
        try:
            yield
        finally:
            del os.environ[UPLOADS]
