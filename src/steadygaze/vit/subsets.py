"""Many runs of a model on subsets of its patches: grouped by size, in bounded chunks, packed if possible.

| mode   | a patch that is not kept                                                                      |
| remove | its token is removed after `embed`, the others keep their positions; short runs are cheap     |
| mask   | is hidden from attention, pooling and convolutions (`vit.masking`), if all patches are needed |
| fill   | its pixels are set to zero, the mean colour of a normalised image; every run is a full one     |

A model whose head reads only patches has nothing to read when none is left: its logits are then zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.errors import MethodUnavailable
from steadygaze.vit.masking import masked_logits
from steadygaze.vit.packing import CannotPack, Group, packable, packed_logits, take
from steadygaze.vit.view import ViT

HidingMode = Literal["remove", "mask", "fill"]
# tokens in one chunk: what caches hold; fixed, so that results do not depend on the number of threads
TOKENS = {"cpu": 1024}
TOKENS_ELSEWHERE = 1 << 17


def chunk_of(x: Tensor) -> int:
    """Tokens that run at once on the device of `x`."""
    return TOKENS.get(x.device.type, TOKENS_ELSEWHERE)


def reads_nothing(vit: ViT) -> bool:
    """Whether the head has nothing to read when no patch is left."""
    return vit.readout != "class" or vit.plan.readout_patches > 0


@dataclass(frozen=True)
class Piece:
    """Runs of one size, few enough to go through the model at once.

    place: where the results belong, as the caller counts; tokens: their number in all
    """

    group: Group
    place: Any
    tokens: int


def pieces(
    vit: ViT, tokens: Float[Tensor, "b n d"], group: Group, here: tuple[Any, ...] = ()
) -> Iterator[Piece]:
    """Split a group into pieces; the place of each is (*here, its slice of the group)."""
    length = vit.prefix + group.keep.shape[1] if vit.plan.removable else tokens.shape[1]
    size = max(1, chunk_of(tokens) // max(1, length))
    for start in range(0, len(group.keep), size):
        part = slice(start, min(start + size, len(group.keep)))
        kept = group.keep[part].sort(dim=1).values  # raster order: equal sets give equal bits
        yield Piece(Group(group.image[part], kept), (*here, part), len(kept) * length)


def run_pieces(
    vit: ViT, tokens: Float[Tensor, "b n d"], wanted: Sequence[Piece]
) -> Iterator[tuple[Piece, Float[Tensor, "s classes"]]]:
    """Logits of the pieces, several at once where chunk size and model allow it."""
    grid = vit.layout(tokens).grid
    if not vit.plan.removable:
        for piece in wanted:
            there = torch.zeros(
                len(piece.group.keep), grid[0] * grid[1], dtype=torch.bool, device=tokens.device
            )
            there.scatter_(1, piece.group.keep, True)
            yield piece, masked_logits(vit, tokens, there.view(-1, *grid), piece.group.image)
        return
    together = packable(vit, tokens)
    for batch in _batches(wanted, chunk_of(tokens), together):
        if together:
            try:
                yield from zip(
                    batch, packed_logits(vit, tokens, [piece.group for piece in batch]), strict=True
                )
                continue
            except CannotPack:
                together = False
        for piece in batch:
            yield piece, vit.logits(take(vit, tokens, piece.group))


def _batches(wanted: Sequence[Piece], limit: int, packed: bool) -> Iterator[list[Piece]]:
    """Pieces that run together: as many as fit if the model can be packed, else one at a time."""
    batch: list[Piece] = []
    for piece in wanted:
        if batch and (not packed or sum(p.tokens for p in batch) + piece.tokens > limit):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def can_mask(vit: ViT, tokens: Float[Tensor, "b n d"]) -> bool:
    """Whether patches can be hidden from this model's attention, determined by trying."""
    grid = vit.layout(tokens).grid
    keep = torch.ones(1, *grid, dtype=torch.bool, device=tokens.device)
    keep[0, 0, 0] = False
    try:
        with torch.no_grad():
            masked_logits(vit, tokens, keep, torch.zeros(1, dtype=torch.long, device=tokens.device))
    except (MethodUnavailable, RuntimeError, TypeError):
        return False
    return True


def subset_logits(
    vit: ViT,
    images: Float[Tensor, "b c hh ww"],
    tokens: Float[Tensor, "b n d"],
    keep: Bool[Tensor, "s p"],
    image: Int[Tensor, " s"],
    mode: HidingMode,
) -> Float[Tensor, "s classes"]:
    """Logits with only the patches `keep`; row s belongs to image `image[s]`."""
    results: list[tuple[Tensor, Tensor]] = []
    count = keep.sum(1)
    empty = count == 0 if reads_nothing(vit) and mode != "fill" else torch.zeros_like(count, dtype=torch.bool)
    rest = (~empty).nonzero()[:, 0]
    if mode == "remove":
        wanted: list[Piece] = []
        for size in count[rest].unique().tolist():
            rows = rest[count[rest] == size]
            group = Group(image[rows], keep[rows].nonzero()[:, 1].view(len(rows), size))
            wanted += [Piece(p.group, rows[p.place[0]], p.tokens) for p in pieces(vit, tokens, group)]
        results = [(piece.place, logits) for piece, logits in run_pieces(vit, tokens, wanted)]
    else:
        grid = vit.layout(tokens).grid
        size = max(1, chunk_of(tokens) // tokens.shape[1])
        for rows in rest.split(size) if len(rest) else ():  # an empty tensor is split into one empty piece
            cells = keep[rows].view(-1, *grid)
            if mode == "mask":
                results.append((rows, masked_logits(vit, tokens, cells, image[rows])))
            else:
                results.append((rows, vit(images[image[rows]] * to_pixels(cells, images))))
    classes = results[0][1].shape[1] if results else vit(images[:1]).shape[1]
    logits = images.new_zeros(len(keep), classes)
    for rows, some in results:
        logits[rows] = some
    return logits


def to_pixels(cells: Tensor, images: Float[Tensor, "b c hh ww"]) -> Float[Tensor, "s 1 hh ww"]:
    """A mask over the cells of a grid (s, h, w), enlarged to pixels."""
    return F.interpolate(cells[:, None].to(images.dtype), size=images.shape[-2:], mode="nearest")
