"""Many runs of a model on subsets of its patches: grouped by size, in bounded chunks, packed if possible.

| mode   | a patch that is not kept                                                                      |
| remove | its token is removed after `embed`, the others keep their positions; short runs are cheap     |
| mask   | is hidden from attention, pooling and convolutions (`vit.masking`), if all patches are needed |
| fill   | its pixels are set to zero, the mean color of a normalized image; every run is a full one     |

A model whose head reads only patches has nothing to read when none is left: its logits are then zeros.

Packed subsets run through the blocks as one sequence, each attending only to itself. Everything in a plain
ViT's block but attention works on each token alone, so subsets can be laid end to end; attention is answered
group by group (a group: subsets of one size). That saves the overhead of many short runs. Whether a model can
be packed is determined by trying: once for a model, against separate runs, and at every run its attention
calls are counted.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.results.check import HidingMode
from steadygaze.vit.intercept import Interception, TorchFunction
from steadygaze.vit.masking import masked_logits
from steadygaze.vit.view import ViT, remember

_CALLS: "weakref.WeakKeyDictionary[ViT, int]" = (
    weakref.WeakKeyDictionary()
)  # attention calls of a packed run; 0: cannot be packed


class CannotPackError(Exception):
    """This model's blocks cannot run on a packed sequence."""


@dataclass(frozen=True)
class Group:
    """Subsets of one size: subset s is the patches keep[s] of image[s]."""

    image: Int[Tensor, " s"]
    keep: Int[Tensor, "s k"]


def take(vit: ViT, tokens: Float[Tensor, "b n d"], group: Group) -> Float[Tensor, "s m d"]:
    """`vit.select` for many subsets of few images."""
    prefix = torch.arange(vit.prefix, device=group.keep.device).expand(len(group.keep), -1)
    few = tokens[group.image[:, None], torch.cat([prefix, group.keep + vit.prefix], dim=1)]
    return remember(few, replace(vit.layout(tokens), kept=group.keep))


def packed_logits(
    vit: ViT, tokens: Float[Tensor, "b n d"], groups: Sequence[Group]
) -> list[Float[Tensor, "s classes"]]:
    """Logits of every subset of every group, in one run; CannotPackError if the model does not allow it."""
    if (
        len(groups) == 1
    ):  # one size: an ordinary batch, and no positions to look up in a model that can be packed
        x = remember(take(vit, tokens, groups[0]), vit.layout(tokens))
        for block in vit.blocks:
            x = block(x)
        return [vit.head(remember(x, replace(vit.layout(tokens), kept=groups[0].keep)))]
    logits, calls = _run(vit, tokens, groups)
    if calls != _CALLS.get(vit):
        raise CannotPackError
    return logits


def packable(vit: ViT, tokens: Float[Tensor, "b n d"]) -> bool:
    """Whether packed runs give what separate ones give."""
    if vit not in _CALLS:
        with torch.no_grad():
            _CALLS[vit] = _try(vit, tokens)
    return _CALLS[vit] > 0


def _try(vit: ViT, tokens: Tensor) -> int:
    patches = vit.plan.grid[0] * vit.plan.grid[1]
    if not (vit.plan.removable and vit.plan.global_attention) or vit.plan.rotary or patches < 3:
        return 0
    first = torch.zeros(1, dtype=torch.long, device=tokens.device)
    some = torch.arange(patches - 1, -1, -1, device=tokens.device)[None]
    groups = [Group(first, some[:, :1]), Group(first.repeat(2), torch.cat([some[:, 1:3], some[:, :2]]))]
    try:
        results, calls = _run(vit, tokens, groups)
    except Exception:  # whatever a library's block does with a length that it did not expect
        return 0
    for group, logits in zip(groups, results, strict=True):
        expected = vit.logits(take(vit, tokens, group))
        error = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if not error <= 200 * torch.finfo(expected.dtype).eps ** (
            0.5 if expected.dtype.itemsize <= 2 else 0.75
        ):
            return 0
    return calls


def _run(vit: ViT, tokens: Tensor, groups: Sequence[Group]) -> tuple[list[Tensor], int]:
    layout, width = vit.layout(tokens), tokens.shape[-1]
    few = [take(vit, tokens, group) for group in groups]
    x = remember(torch.cat([f.reshape(1, -1, width) for f in few], dim=1), layout)
    sizes = [(f.shape[0], f.shape[1]) for f in few]
    with _Apart(sizes) as mode:
        for block in vit.blocks:
            x = block(x)
    parts = [
        p.view(s, m, width)
        for p, (s, m) in zip(x.split([s * m for s, m in sizes], dim=1), sizes, strict=True)
    ]
    if (
        vit.readout == "class" and vit.plan.readout_patches == 0
    ):  # the head reads prefix tokens only: one call for all groups
        rows = torch.cat([p[:, : vit.prefix] for p in parts])
        nothing = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
        logits = vit.head(remember(rows, replace(layout, kept=nothing)))
        return list(logits.split([s for s, _ in sizes])), mode.calls
    heads = [vit.head(remember(p, replace(layout, kept=g.keep))) for p, g in zip(parts, groups, strict=True)]
    return heads, mode.calls


class _Apart(Interception):
    """Attention within each subset of a packed sequence."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.sizes, self.calls = sizes, 0
        self.intercept("sdpa", F.scaled_dot_product_attention)

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        total = sum(s * m for s, m in self.sizes)
        if attn_mask is not None or is_causal or q.shape[0] != 1 or not q.shape[-2] == k.shape[-2] == total:
            raise CannotPackError
        self.calls += 1
        heads, width = q.shape[1], v.shape[-1]
        out = q.new_empty(1, total, heads, width).transpose(
            1, 2
        )  # as the fused kernel lays it out: what follows needs no copy
        start = 0
        for s, m in self.sizes:
            span = slice(start, start + s * m)
            query, key, value = (t[0, :, span].unflatten(1, (s, m)).transpose(0, 1) for t in (q, k, v))
            part = func(query, key, value, dropout_p=dropout_p, **kwargs)
            out[0, :, span] = part.transpose(0, 1).flatten(1, 2)
            start += s * m
        return out


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

    Attributes:
        place: Where the results belong, as the caller counts.
        tokens: Their number in all.
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
            except CannotPackError:
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
    except (MethodUnavailableError, RuntimeError, TypeError):
        return False
    return True


def available_hiding(vit: ViT, tokens: Float[Tensor, "b n d"]) -> HidingMode:
    """How patches of this model are left out: "remove", or the closest that it allows."""
    if vit.plan.removable:
        return "remove"
    return "mask" if can_mask(vit, tokens) else "fill"


def ranking(maps: Float[Tensor, "*b gh gw"]) -> Int[Tensor, "*b p"]:
    """Patch indices by descending relevance; ties in raster order."""
    return maps.flatten(-2).argsort(dim=-1, descending=True, stable=True)


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
