"""Random numbers that belong to an image: the same in any order, batch, process and shard."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np


def image_seed(seed: int, image: str | bytes, *, separator: str = "\0", size: int = 6) -> int:
    """The seed of one image, from the run's seed and the image.

    Args:
        image: Its name, for a seed in 0..256**size - 1; or its pixels as bytes, for one in 0..2**32 - 1.
        separator: Text that is hashed between seed and name. Set where the numbers of earlier versions must
            stay the same.
        size: Number of bytes of the hash that are used.

    Examples:
        >>> image_seed(0, "cat/0.png") == image_seed(0, "cat/0.png") != image_seed(1, "cat/0.png")
        True
    """
    if isinstance(image, bytes):
        return zlib.crc32(str(seed).encode() + image)
    digest = hashlib.sha256(f"{seed}{separator}{image}".encode()).digest()
    return int.from_bytes(digest[:size], "big")


def combined_seed(*numbers: int) -> int:
    """One 32-bit seed of several numbers, such as (seed, epoch, index); neighbors give unrelated seeds.

    Examples:
        >>> combined_seed(0, 1) == combined_seed(0, 1) != combined_seed(1, 0)
        True
    """
    words = [number & 0xFFFFFFFF for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
