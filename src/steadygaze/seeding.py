"""Random numbers that belong to an image: the same in any order, batch, process and shard."""

from __future__ import annotations

import hashlib
import zlib


def image_seed(seed: int, image: str | bytes) -> int:
    """The seed of one image, from the run's seed and the image.

    image: its name (gives 0..2**48 - 1), or its pixels as bytes (gives 0..2**32 - 1)

    >>> image_seed(0, "cat/0.png") == image_seed(0, "cat/0.png") != image_seed(1, "cat/0.png")
    True
    """
    if isinstance(image, bytes):
        return zlib.crc32(str(seed).encode() + image)
    return int.from_bytes(hashlib.sha256(f"{seed}\0{image}".encode()).digest()[:6], "big")
