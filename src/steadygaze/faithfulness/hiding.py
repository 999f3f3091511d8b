"""How patches are hidden: removed, or painted over.

    remove   their tokens are removed after `embed`, or masked in attention where the model needs every patch
    paint    their pixels are replaced by what the option `fill` names, and the model sees a whole image

Removal shows the model nothing in their place; painted patches are patches too, which the model reads.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.errors import UnknownNameError
from steadygaze.faithfulness.inputs import CachedForward, MetricInput
from steadygaze.faithfulness.perturbation import fill_values
from steadygaze.vit.removal import HidingMode, Piece, subset_logits, to_pixels

HIDES = ("remove", "paint")


def paint_of(given: MetricInput) -> Float[Tensor, "b c h w"] | None:
    """The pixels that replace those of hidden patches; None if patches are removed."""
    if given.hide not in HIDES:
        raise UnknownNameError("way to hide patches", given.hide, HIDES)
    return fill_values(given.batch, given.fill, given.seed) if given.hide == "paint" else None


def hiding_note(given: MetricInput) -> str:
    """How patches are hidden, for the rows."""
    if given.hide == "paint":
        return f"painted, {given.fill}"
    return "removal" if given.vit.plan.removable else "attention masking"


def kept_logits(
    whole: CachedForward,
    keep: Bool[Tensor, "s p"],
    image: Int[Tensor, " s"],
    paint: Float[Tensor, "b c h w"] | None = None,
) -> Float[Tensor, "s classes"]:
    """Logits with only the patches `keep`; row s belongs to image `image[s]`."""
    if paint is None:
        mode: HidingMode = "remove" if whole.vit.plan.removable else "mask"
        return subset_logits(whole.vit, whole.images, whole.tokens, keep, image, mode)
    logits = []
    for rows in torch.arange(len(keep), device=keep.device).split(whole.images_at_once):
        seen = to_pixels(keep[rows].unflatten(1, whole.grid), whole.images) > 0
        logits.append(whole.vit(torch.where(seen, whole.images[image[rows]], paint[image[rows]])))
    return torch.cat(logits)


def painted_pieces(
    whole: CachedForward, wanted: Sequence[Piece], paint: Float[Tensor, "b c h w"]
) -> Iterator[tuple[Piece, Float[Tensor, "s classes"]]]:
    """As `run_pieces` of `vit.removal`, with painted patches instead of removed ones."""
    patches = whole.grid[0] * whole.grid[1]
    for piece in wanted:
        kept = piece.group.keep
        there = torch.zeros(len(kept), patches, dtype=torch.bool, device=kept.device).scatter_(1, kept, True)
        yield piece, kept_logits(whole, there, piece.group.image, paint)
