"""`steadygaze app`: serves the page until it is stopped."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from steadygaze.app import page
from steadygaze.cli.running import say
from steadygaze.errors import BadInput
from steadygaze.loading.load import load_model


def run(model: str, checkpoint: Path | None, num_classes: int | None, gates: Path | None, device: str, host: str, port: int,
        show: bool) -> int:  # fmt: skip
    """Load the model and serve its page; gives the exit code."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    made = page(load_model(model, checkpoint, num_classes=num_classes, device=device), gates)
    try:
        _, address, _ = made.launch(
            server_name=host, server_port=port, inbrowser=show, quiet=True, prevent_thread_lock=True
        )
    except OSError as error:
        raise BadInput(
            f"port {port} of {host} cannot be used: {error}. Say --port with another one."
        ) from error
    say(Console(), f"the page is at {address} (Ctrl-C ends it)")
    made.block_thread()
    return 0
