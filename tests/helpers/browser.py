"""A real browser for a test: Chromium, driven by playwright, without a window."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60_000  # milliseconds: machines of continuous integration are slow
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@contextmanager
def chromium() -> Iterator[Any]:
    """The system's Chromium, or playwright's own; skips the test if there is none."""
    reason = 'needs playwright: pip install "steadygaze[browser]"'
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    with api.sync_playwright() as playwright:
        found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES))
        path = next(filter(None, found), playwright.chromium.executable_path)
        if not Path(path).exists():
            pytest.skip("no Chromium: install the package chromium, or set CHROMIUM to an executable")
        api.expect.set_options(timeout=TIMEOUT)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
