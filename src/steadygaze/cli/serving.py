"""`steadygaze app`: serves the interactive page until it is interrupted."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from steadygaze.app import page
from steadygaze.cli.running import print_line
from steadygaze.errors import BadInput
from steadygaze.loading.load import load_model


def run(
    model: str,
    checkpoint: Path | None,
    num_classes: int | None,
    diffmask: Path | None,
    device: str,
    host: str,
    port: int,
    open_browser: bool,
    *,
    trust_remote_code: bool = False,
) -> int:
    """Load the model and serve its page; returns the exit code."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(
        model, checkpoint, num_classes=num_classes, device=device, trust_remote_code=trust_remote_code
    )
    blocks = page(loaded, diffmask)
    try:
        _, address, _ = blocks.launch(
            server_name=host,
            server_port=port,
            inbrowser=open_browser,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise BadInput(f"cannot bind {host}:{port}: {error}. Choose another port.", option="port") from error
    print_line(Console(), f"serving at {address} (press Ctrl-C to stop)")
    blocks.block_thread()
    return 0
