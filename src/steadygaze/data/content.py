"""Content hashes: 16 hex digits that identify the bytes of an image, whatever the file is called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from steadygaze.data.images import Source, check_regular_file
from steadygaze.errors import BadImage

DIGITS = 16


def bytes_hash(data: bytes) -> str:
    """The first 16 hex digits of the SHA-256 of these bytes.

    >>> bytes_hash(b"")
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def file_hash(path: str | Path) -> str:
    """The hash of a file's bytes; `BadImage` if the file cannot be read."""
    check_regular_file(path)
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError as error:
        raise BadImage(f"{path}: {error.strerror}") from error


def source_hash(source: Source) -> str:
    """The hash of the bytes of an image, wherever they are; `BadImage` if they cannot be read."""
    if isinstance(source, (str, Path)):
        return file_hash(source)
    return bytes_hash(source if isinstance(source, bytes) else source.read())


def tensor_hash(*tensors: Tensor | None) -> str:
    """The hash of the dtype, shape and bytes of these tensors; None is skipped."""
    hashed = hashlib.sha256()
    for x in tensors:
        if x is not None:
            hashed.update(f"{x.dtype} {tuple(x.shape)}".encode())
            hashed.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:DIGITS]


def names_hash(lines: Iterable[str]) -> str:
    """The hash of a list of lines, such as the names of a run's images with their labels."""
    return bytes_hash("\n".join(lines).encode())
