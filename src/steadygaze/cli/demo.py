"""`steadygaze demo`: six methods side by side on small pictures that ship with the package."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from steadygaze.cli.explain import Request
from steadygaze.cli.explain import run as explain_files
from steadygaze.method_registry import DEFAULT

METHODS = ("rollout", "gradcam", "gae", "attcat", "decompx+skipplus", DEFAULT)


def run(out: Path) -> int:
    """Explain the demo pictures; gives the exit code."""
    with as_file(files("steadygaze") / "assets" / "demo") as folder:
        return explain_files(
            Request(images=[folder], model="embedded", methods=list(METHODS), out=out), Console()
        )
