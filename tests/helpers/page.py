"""The page, served for a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from steadygaze.app import page


@contextmanager
def served(model: Any, *args: Any, launch: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """The address of `page(model, *args, **options)` on a free port."""
    blocks = page(model, *args, **options)
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True, inbrowser=False, **(launch or {}))
    try:
        yield address
    finally:
        blocks.close(verbose=False)
