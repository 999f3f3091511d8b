"""Paths that the user gave are checked before a command imports torch, so that a typing error is answered at
once, by the functions that check them in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from steadygaze.cli.output import print_line, stdout


def check_paths(values: Mapping[str, Any]) -> None:
    """Raise the error of a run for an option that names a missing model, weights, data, masks or calibration.

    Args:
        values: The options of a command by name; others are ignored.
    """
    model, checkpoint, data, masks = (values.get(name) for name in ("model", "checkpoint", "data", "masks"))
    if model is not None and ":" not in model and not Path(model).exists():
        from steadygaze.loading.paths import check_model_path

        check_model_path(model)
    if checkpoint is not None:
        from steadygaze.loading.paths import check_checkpoint_path

        check_checkpoint_path(checkpoint)
    if data is not None:
        from steadygaze.data.stream_spec import is_stream
        from steadygaze.runs.request import folder_of

        if not is_stream(data):
            folder_of(Path(data))
    if masks is not None and not Path(masks).exists():
        from steadygaze.data.masks import require_folder

        require_folder(Path(masks), "masks")
    if values.get("calibration") is not None:
        from steadygaze.untrusted import read_text

        read_text(values["calibration"], "calibration")


def check_images(images: Sequence[str | Path], *, skipped: bool) -> None:
    """End the command if none of the images that were given exists.

    Args:
        skipped: Whether the command skips images that cannot be read, lists them, and exits with 1; others
            raise the `ImageError` of the first.
    """
    from steadygaze.data.images import check_regular_file
    from steadygaze.data.stream_spec import is_stream
    from steadygaze.errors import ImageError

    if any(is_stream(image) or Path(image).exists() for image in images):
        return
    for image in images:
        try:
            check_regular_file(image)
        except ImageError as error:
            if not skipped:
                raise
            print_line(stdout(), f"not read: {error}", "red")
    raise typer.Exit(1)
