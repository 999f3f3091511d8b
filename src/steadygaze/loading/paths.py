"""Whether models and weights that are named by a path exist, checked without importing torch."""

from __future__ import annotations

from pathlib import Path

from steadygaze.errors import CheckpointError, InputError


def check_model_path(name: str) -> None:
    """Raise `InputError` if a model's name is a path that leads nowhere; hub names have one slash.

    Examples:
        >>> check_model_path("facebook/dinov2-base")
    """
    if not Path(name).is_dir() and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise InputError(
            f"{name}: no such file or folder. A model is a name, a folder, or owner/name of the hub",
            option="model",
        )


def check_checkpoint_path(path: str | Path) -> None:
    """Raise `CheckpointError` unless there is such a file."""
    if not Path(path).is_file():
        raise CheckpointError(
            f"expected a checkpoint file (.safetensors, .pth, .pt, .bin), got {path}: no such file"
        )
