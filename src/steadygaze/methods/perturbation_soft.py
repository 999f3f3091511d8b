"""Black-box methods whose runs hide nothing wholly: soft masks made of the model's own channels, and attention turned down.

A_k ∈ R^{h×w} is channel k of the patch tokens at the input of the last block, Ā_k the same scaled to 0..1; x_j are the token embeddings.

| name     | run                                                                           | s_j                                    |
| scorecam | x_j Ā_kj for each channel k (Wang et al. 2020)                                | relu Σ_k softmax_k(f_k − f(none)) A_kj |
| vit_cx   | m_j x_j + (1 − m_j) ε_j, m the mean Ā_k of a cluster (Xie et al. 2023)        | Σ_m f_m m_j / Σ_m m_j                  |
| atman    | attention logits of the columns k times 1 − 0.9 c_jk (Deiseroth et al. 2023)  | f(all) − f_j                           |

c_jk is 1 for j itself, the cosine similarity of the embeddings where that is over 0.7, else 0; in every layer, before softmax.
f(none) falls out of the softmax. `softmax=False` weighs by f_k itself, as the authors' code of Score-CAM does. Channels run in
the order of their spread, so that a small budget has those that say most. ε is noise of the size `noise` x the tokens' own spread. Clusters
are agglomerative, complete linkage, cosine distance up to 0.1, largest first. atman explains the logit; the others the probability.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.method_registry import register_method
from steadygaze.methods.attention import global_attention
from steadygaze.methods.perturbation import (
    BLACK_BOX,
    PATCHES,
    held_mean,
    of_those_done,
    on_grid,
    spread_order,
)
from steadygaze.methods.search import budget_of, generators, searched, values, whole_rounds
from steadygaze.trace.seam import Seam
from steadygaze.vit.masking import places
from steadygaze.vit.view import remember

CHANNELS = 192  # of a tiny ViT, for the costs that are listed
DISTANCE = 0.1


def channels(ask: Any) -> Float[Tensor, "b k h w"]:
    """A_k, on the grid of the last block."""
    with torch.no_grad():
        x = ask.tokens
        for block in ask.vit.blocks[:-1]:
            x = block(x)
        return ask.vit.blocks[-1].patches(x, ask.vit.layout(x)).permute(0, 3, 1, 2)


def to_one(maps: Float[Tensor, "*k h w"]) -> Float[Tensor, "*k h w"]:
    """Scaled to 0..1; a map that is the same everywhere is zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / (high - low).clamp_min(torch.finfo(maps.dtype).tiny)


def on_tokens(ask: Any, masks: Float[Tensor, "s h w"]) -> Float[Tensor, "s n 1"]:
    """Masks over the map's grid as weights of the tokens; prefix tokens have weight one."""
    where = places(ask.vit, ask.tokens)
    if masks.shape[-2:] != where.shape:
        masks = F.interpolate(masks[:, None], size=tuple(where.shape), mode="bilinear", align_corners=False)[
            :, 0
        ]
    weights = masks.new_ones(len(masks), ask.tokens.shape[1])
    weights[:, where.flatten()] = masks.flatten(1)
    return weights[..., None]


def soft(
    ask: Any, name: str, masks: Float[Tensor, "b r h w"], total: int, hidden: Tensor | None = None
) -> Float[Tensor, "b done"]:
    """f with the tokens weighed by each mask, and the rest taken from `hidden` (default: zero)."""
    layout = ask.vit.layout(ask.tokens)

    def run(part: slice) -> Tensor:
        some = masks[:, part]
        m = on_tokens(ask, some.flatten(0, 1))
        x = m * ask.tokens.repeat_interleave(some.shape[1], 0)
        if hidden is not None:
            x = x + (1 - m) * hidden.repeat_interleave(some.shape[1], 0)
        return values(ask, ask.vit.logits(remember(x, layout)).unflatten(0, some.shape[:2]))

    return searched(name, total, whole_rounds(ask), run)


@register_method("scorecam", "model", cost=CHANNELS + 1.0, **BLACK_BOX)
def scorecam(ask: Any, *, budget: int | None = None, softmax: bool = True) -> Float[Tensor, "b h w"]:
    """Channels weighed by what the model answers with each as a mask (Score-CAM; budget: none is every channel)."""
    a = channels(ask)
    order = a.flatten(2).std(2).argsort(dim=1, descending=True, stable=True)
    a = a.gather(1, order[:, :, None, None].expand_as(a))
    f = soft(ask, "scorecam", to_one(a), budget_of("scorecam", budget, 1, a.shape[1]))
    weight = f.softmax(1) if softmax else f
    return torch.einsum("bk,bkhw->bhw", weight.to(a), a[:, : f.shape[1]]).clamp_min(0)


@register_method("vit_cx", "model", cost=60.0, **BLACK_BOX)
def vit_cx(
    ask: Any, *, budget: int | None = None, noise: float = 0.1, seed: int = 0
) -> Float[Tensor, "b h w"]:
    """Mean answer to the patches that belong together in the model's own channels (ViT-CX; budget: none is every cluster)."""
    spread = ask.tokens.flatten(1).std(1)[:, None, None]
    draws = [
        torch.randn(x.shape, generator=g, dtype=torch.float64)
        for x, g in zip(ask.tokens, generators(ask, seed), strict=True)
    ]
    hidden = noise * spread * torch.stack(draws).to(ask.tokens)
    each = [clustered(a) for a in to_one(channels(ask))]
    longest = max(len(masks) for masks in each)
    masks = torch.stack(
        [F.pad(m, (0, 0, 0, 0, 0, longest - len(m))) for m in each]
    )  # no mask: no weight in either sum
    f = soft(ask, "vit_cx", masks, budget_of("vit_cx", budget, 1, longest), hidden)
    return held_mean(f, masks[:, : f.shape[1]].to(f).flatten(2)).unflatten(1, masks.shape[-2:])


def clustered(maps: Float[Tensor, "k h w"]) -> Float[Tensor, "clusters h w"]:
    """The mean map of each cluster; the largest cluster first, equal ones by their first channel."""
    unit = F.normalize(maps.flatten(1).double().cpu(), dim=1)
    members = agglomerated(1 - unit @ unit.T, DISTANCE)
    members.sort(key=lambda one: (-len(one), one[0]))
    return torch.stack([maps[one].mean(0) for one in members])


def agglomerated(distance: Float[Tensor, "k k"], limit: float) -> list[list[int]]:
    """Complete linkage: the two nearest clusters are joined while their farthest members are within `limit`."""
    distance = distance.clone()
    distance.fill_diagonal_(float("inf"))
    members: dict[int, list[int]] = {i: [i] for i in range(len(distance))}
    nearest, partner = distance.min(1)
    while True:
        i = int(nearest.argmin())
        if not nearest[i] <= limit:
            return [sorted(one) for one in members.values()]
        j = int(partner[i])
        members[i] += members.pop(j)
        row = torch.maximum(distance[i], distance[j])
        distance[i], distance[:, i] = row, row
        distance[j], distance[:, j] = float("inf"), float("inf")
        distance[i, i] = float("inf")
        stale = (partner == i) | (partner == j)
        stale[i] = stale[j] = True
        nearest[stale], partner[stale] = distance[stale].min(1)


class Turned(Seam):
    """Attention logits of each key multiplied by a factor of its own, factor (s, n), before softmax."""

    def __init__(self, factor: Float[Tensor, "s n"], prefix: int) -> None:
        super().__init__()
        self.factor, self.prefix = factor, prefix

    def of(self, keys: int) -> Float[Tensor, "s keys"]:
        """The factors of as many keys: all tokens, the patches, or a pooling's own token before them."""
        f = self.factor
        known = {
            f.shape[1]: f,
            f.shape[1] - self.prefix: f[:, self.prefix :],
            f.shape[1] + 1: F.pad(f, (1, 0), value=1.0),
        }
        if keys not in known:
            raise BadInput(
                f"atman: expected attention over {f.shape[1]} tokens, got {keys} keys in one attention of this model"
            )
        return known[keys]

    def sdpa(
        self,
        func: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        factor = self.of(k.shape[-2])
        k = k * factor[:, None, :, None].to(k)
        if (
            attn_mask is not None and attn_mask.dtype != torch.bool
        ):  # a table of positions is part of the logits
            attn_mask = attn_mask * factor[:, None, None, :].to(attn_mask)
        return super().sdpa(func, q, k, v, attn_mask, *args, **kwargs)

    def softmax(self, func: Any, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if x.dim() == 4 and dim in (-1, 3):
            x = x * self.of(x.shape[-1])[:, None, None, :].to(x)
        return super().softmax(func, x, dim, *args, **kwargs)


@register_method(
    "atman", "model", cost=PATCHES + 1.0, unsupported=global_attention, **{**BLACK_BOX, "score": "logit"}
)
def atman(
    ask: Any, *, budget: int | None = None, suppress: float = 0.9, similar: float = 0.7
) -> Float[Tensor, "b h w"]:
    """How much the class loses when attention to a patch, and to those like it, is turned down (AtMan; budget: none is every patch)."""
    for option, value in (("suppress", suppress), ("similar", similar)):
        if not 0 <= value <= 1:
            raise BadInput(f"atman: {option} is a number in 0..1, got {value!r}")
    p, prefix = ask.grid[0] * ask.grid[1], ask.vit.prefix
    order, layout = spread_order(p), ask.vit.layout(ask.tokens)
    unit = F.normalize(ask.tokens[:, prefix:], dim=-1)
    like = unit @ unit.transpose(1, 2)
    like = torch.where(like > similar, like, torch.zeros_like(like))
    like.diagonal(dim1=1, dim2=2).fill_(1.0)
    factor = F.pad(1 - suppress * like[:, order], (prefix, 0), value=1.0)  # (B, run, token)
    factor = torch.cat([torch.ones_like(factor[:, :1]), factor], 1)

    def run(part: slice) -> Tensor:
        some = factor[:, part]
        x = remember(ask.tokens.repeat_interleave(some.shape[1], 0), layout)
        with Turned(some.flatten(0, 1), prefix):
            logits = ask.vit.logits(x)
        return values(ask, logits.unflatten(0, some.shape[:2]))

    f = searched("atman", budget_of("atman", budget, 2, p + 1), whole_rounds(ask), run, least=2)
    return on_grid(ask, of_those_done(f[:, :1] - f[:, 1:], order, p))
