"""The page, served for a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from steadygaze.app import page


@contextmanager
def served(model: Any, *args: Any, launch: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """The address of `page(model, *args, **options)` on a free port."""
    blocks = page(model, *args, **options)
    # gradio gives its own server three seconds to answer, too few on a busy machine
    with patch("gradio.networking.url_ok", return_value=True):
        _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True, inbrowser=False, **(launch or {}))
    try:
        yield address
    finally:
        blocks.close(verbose=False)
