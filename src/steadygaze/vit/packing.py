"""Packing: many subsets of patches run through the blocks as one sequence, each attending only to itself.

Everything in a plain ViT's block but attention works on each token alone, so subsets can be laid end to
end; attention is answered group by group (a group: subsets of one size). That saves the overhead of many
short runs. Whether a model can be packed is determined by trying: once for a model, against separate runs,
and at every run its attention calls are counted.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.trace.intercept import Interception, TorchFunction
from steadygaze.vit.view import ViT, remember

_CALLS: "weakref.WeakKeyDictionary[ViT, int]" = (
    weakref.WeakKeyDictionary()
)  # attention calls of a packed run; 0: cannot be packed


class CannotPack(Exception):
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
    """Logits of every subset of every group, in one run; raises CannotPack if the model does not allow it."""
    if (
        len(groups) == 1
    ):  # one size: an ordinary batch, and no positions to look up in a model that can be packed
        x = remember(take(vit, tokens, groups[0]), vit.layout(tokens))
        for block in vit.blocks:
            x = block(x)
        return [vit.head(remember(x, replace(vit.layout(tokens), kept=groups[0].keep)))]
    logits, calls = _run(vit, tokens, groups)
    if calls != _CALLS.get(vit):
        raise CannotPack
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
            raise CannotPack
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
