"""Weights from the hub: one clear error for whatever it cannot deliver, with or without a network."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from urllib.parse import urlsplit

from steadygaze.errors import BadCheckpoint, SteadygazeError


@contextmanager
def hub(name: str, local: bool = False) -> Iterator[None]:
    """Turn the hub's errors into `BadCheckpoint`. Without a network, search the local cache only, at once."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    constants.HF_HUB_OFFLINE = before or not (
        local or proxied or _resolves(urlsplit(constants.ENDPOINT).hostname)
    )
    try:
        yield
    except SteadygazeError:
        raise
    except Exception as error:
        if not local and not isinstance(error, OSError | RuntimeError | ValueError):
            raise  # no fault of the hub; of a folder, everything is the folder's
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if local:
            raise BadCheckpoint(
                f"{name} cannot be read as a transformers folder ({shorten(reason, 200)})"
            ) from error
        raise BadCheckpoint(
            f"the weights of {name} are not on this machine and could not be downloaded "
            f"({shorten(reason, 120)}). Give a local file as checkpoint, or use the model 'embedded'."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _resolves(host: str | None) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, 443))
    except OSError:
        return False
