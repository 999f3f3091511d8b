"""timm's RandAugment on every Pillow: today's refuses to keep no bit of a colour, which timm asks of it at full strength."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from steadygaze.errors import BadInput


def rand_augment(words: str, mean: Sequence[float], side: int) -> Any:
    """timm's RandAugment by its words; mean: the colour of what is moved in, side: of the picture, in pixels."""
    from timm.data.auto_augment import rand_augment_transform

    grey = tuple(min(255, round(255 * m)) for m in mean)
    try:
        made = rand_augment_transform(words, {"translate_const": int(side * 0.45), "img_mean": grey})
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise BadInput(
            f"augment.rand_augment: expected timm's words, such as rand-m9-mstd0.5-inc1, got {words!r}"
        ) from error
    for op in made.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = posterize
    return made


def posterize(picture: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """The highest bits of every colour; black where none is kept, as Pillow did it when the recipes were written."""
    from timm.data.auto_augment import posterize

    return posterize(picture, bits_to_keep) if bits_to_keep > 0 else Image.new(picture.mode, picture.size)
