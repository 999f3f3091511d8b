"""Weights from a hub: with a network or without one, what cannot be had is one clear error."""

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
    """Turn what a hub cannot give into one clear error; without a network, look only into the local cache, at once."""
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
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if local:
            raise BadCheckpoint(
                f"{name} is no transformers folder that can be read ({shorten(reason, 200)})"
            ) from error
        raise BadCheckpoint(
            f"the weights of {name} are neither on this machine nor could they be fetched ({shorten(reason, 120)}). Give "
            "a local file, checkpoint=FILE or --checkpoint FILE on the command line, or take the model 'embedded'."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _resolves(host: str | None) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, 443))
    except OSError:
        return False
