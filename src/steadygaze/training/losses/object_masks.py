"""Object masks as the losses use them: which pixels are object, which background, and which are not
counted."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.data.masks import BORDER, OBJECT
from steadygaze.errors import BadInput, UnknownName

Pixels = Float[Tensor, "b h w"]


def object_and_background(
    masks: Tensor, images: Tensor, *, reverse: str = "complement"
) -> tuple[Pixels, Pixels, Pixels]:
    """(S, S̄, counted), each (B, H, W): object, background, and 1 where a pixel is counted.

    masks: (B, H, W) or (B, 1, H, W); 255 object, 128 border (not counted), 0 background; or booleans; or the
        object's share of each pixel, 0..1
    reverse: "complement" is S̄ = 1 − S; "reference" keeps shares between 0 and 1 as they are, as the authors'
        code does
    """
    if reverse not in ("complement", "reference"):
        raise UnknownName("reverse", str(reverse), ("complement", "reference"))
    masks = masks[:, 0] if masks.dim() == 4 and masks.shape[1] == 1 else masks
    expected = (len(images), *images.shape[-2:])
    if tuple(masks.shape) != expected:
        raise BadInput(f"masks: expected {expected}, the size of the images, got {tuple(masks.shape)}")
    counted = torch.ones_like(masks, dtype=images.dtype)
    if masks.dtype == torch.uint8:
        codes = {0, 1} if int(masks.max()) <= 1 else {0, BORDER, OBJECT}
        if other := set(masks.unique().tolist()) - codes:
            raise BadInput(
                f"masks: expected 255 (object), 128 (border) and 0, or 1 and 0; got {sorted(other)[:8]}"
            )
        s = (masks == max(codes)).to(images.dtype)
        counted = (masks != BORDER).to(images.dtype)
    else:
        s = masks.to(images.dtype)
        if not (float(s.min()) >= 0 and float(s.max()) <= 1):  # also false for NaN
            low, high = float(s.min()), float(s.max())
            raise BadInput(f"masks: expected shares of the object in 0..1, got {low:.3g}..{high:.3g}")
    empty = (s.flatten(1).sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise BadInput(
            f"masks: image(s) {empty} of the batch are background everywhere, without any object. "
            "Leave them out."
        )
    if reverse == "complement":
        background = 1 - s
    else:
        background = torch.where(s == 1, 0.0, torch.where(s == 0, 1.0, s)).to(s)
    return s, background * counted, counted
