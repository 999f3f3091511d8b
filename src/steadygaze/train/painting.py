"""timm's RandAugment on every Pillow: today's refuses to keep no bit of a colour, which timm asks of it at full strength."""

from __future__ import annotations

from typing import Any

from PIL import Image


def posterize(picture: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """The highest bits of every colour; black where none is kept, as Pillow did it when the recipes were written."""
    from timm.data.auto_augment import posterize

    return posterize(picture, bits_to_keep) if bits_to_keep > 0 else Image.new(picture.mode, picture.size)


def mended(transform: Any) -> None:
    """Let the RandAugment inside a Compose, if there is one, posterize by the function above."""
    for step in transform.transforms:
        for op in getattr(step, "ops", ()):
            if op.name.startswith("Posterize"):
                op.aug_fn = posterize
