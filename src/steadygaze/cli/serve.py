"""`steadygaze app`: serves the interactive page until it is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Annotated, Any

from steadygaze.cli import options
from steadygaze.cli.options import LIMITS, SERVER, ModelOptions, declare, takes
from steadygaze.cli.output import print_line, stdout
from steadygaze.cli.paths import check_paths
from steadygaze.errors import InputError

UPLOADS = "GRADIO_TEMP_DIR"  # the environment variable by which gradio finds its folder


@takes(ModelOptions)
def serve(
    *,
    model: options.Model = "embedded",
    calibration: options.CalibrationFile = None,
    diffmask: options.DiffMask = None,
    shapley: options.Shapley = None,
    device: options.Device = "auto",
    host: Annotated[
        str | None,
        declare(
            SERVER,
            "Address to bind. By default 127.0.0.1, which accepts connections from this machine only, "
            "under the names localhost, 127.0.0.1 and [::1]; 0.0.0.0 accepts connections from the network. "
            "With --host, requests for every host name are accepted.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, declare(SERVER, "Port to bind.", "--port", "-p", min=1, max=65535)] = 7860,
    open_browser: Annotated[bool, declare(SERVER, "Open the page in a browser.", "--open")] = False,
    max_methods: Annotated[
        int, declare(LIMITS, "Maximum number of methods per call.", metavar="N", min=1)
    ] = 12,
    max_budget: Annotated[
        int, declare(LIMITS, "Maximum number of forward passes per method.", metavar="N", min=1)
    ] = 2_000,
    max_cost: Annotated[
        int, declare(LIMITS, "Maximum number of forward passes per call.", metavar="N", min=1)
    ] = 5_000,
    max_seconds: Annotated[
        float,
        declare(LIMITS, "Maximum running time of a call; it is then cancelled.", metavar="SECONDS", min=0.1),
    ] = 60.0,
    max_upload_mb: Annotated[
        float, declare(LIMITS, "Maximum size of an uploaded file.", metavar="MB", min=0.1)
    ] = 20.0,
    max_stored_mb: Annotated[
        float,
        declare(
            LIMITS,
            "Maximum size of all uploads and results together; the oldest are deleted.",
            metavar="MB",
            min=1,
        ),
    ] = 1000.0,
    max_calls: Annotated[int, declare(LIMITS, "Maximum number of waiting calls.", metavar="N", min=1)] = 100,
    **values: Any,
) -> None:
    """Serve an interactive page: look at a model, explain, verify, remove patches (extra: app).

    Example: steadygaze app
    Example: steadygaze app -m deit_small_patch16_224 --port 8080 --open
    """
    check_paths({"model": model, "calibration": calibration, **values})
    from steadygaze.app import Limits, page
    from steadygaze.data.decoding import end_decoding
    from steadygaze.loading.ask import as_classifier

    limits = Limits(
        max_methods=max_methods,
        max_budget=max_budget,
        max_cost=max_cost,
        max_seconds=max_seconds,
        max_upload_mb=max_upload_mb,
        max_stored_mb=max_stored_mb,
        max_calls=max_calls,
    )
    chosen = ModelOptions(model=model, **values)
    words = chosen.words
    loaded = chosen.load(device)
    # without words, the page has a box for them
    loaded = loaded if words is None else as_classifier(loaded, words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), temporary_uploads():
        blocks = page(loaded, diffmask, shapley=shapley, calibration=calibration, limits=limits)
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
        print_line(stdout(), f"serving at {address} (press Ctrl-C to stop)")
        try:
            Event().wait()
        finally:
            end_decoding()  # a call that waits for an image would delay the end
            blocks.close(verbose=False)


@contextmanager
def temporary_uploads() -> Iterator[None]:
    """Let gradio store uploads and results in a folder that is deleted at the end."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="steadygaze-app-") as folder:
        os.environ[UPLOADS] = folder
        try:
            yield
        finally:
            del os.environ[UPLOADS]
