"""Black-box methods that use the model's own channels as soft masks over the tokens: Score-CAM and ViT-CX.

A_k ∈ R^{h×w} is channel k of the patch tokens at the input of the last block, Ā_k the same scaled to 0..1;
x_j are the token embeddings (docs/equations.md#scorecam, docs/equations.md#vit-cx).

| name     | run                                                  | s_j                                    |
| scorecam | x_j Ā_kj for each channel k                          | relu Σ_k softmax_k(f_k − f(none)) A_kj |
| vit_cx   | m_j x_j + (1 − m_j) ε_j, m the mean Ā_k of a cluster | Σ_m f_m m_j / Σ_m m_j                  |

Wang et al. 2020 (Score-CAM), Xie et al. 2023 (ViT-CX).

f(none) cancels in the softmax. `softmax=False` weights by f_k itself, as the authors' code of Score-CAM
does. Channels run in order of decreasing standard deviation, so that a small budget uses the most
informative ones. ε is noise with standard deviation `noise` x that of the tokens. Clusters: agglomerative,
complete linkage, cosine distance up to 0.1, largest first.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from steadygaze.method_registry import register_method
from steadygaze.methods.perturbation import BLACK_BOX, mean_where_kept
from steadygaze.methods.search import (
    check_budget,
    explained_values,
    full_runs_per_step,
    image_generators,
    run_search,
)
from steadygaze.trace.query import Query
from steadygaze.vit.masking import token_indices
from steadygaze.vit.view import remember

CHANNELS = 192  # of a tiny ViT, for the listed costs
DISTANCE = 0.1


def channels(query: Query) -> Float[Tensor, "b k h w"]:
    """A_k, on the grid of the last block."""
    with torch.no_grad():
        x = query.tokens
        for block in query.vit.blocks[:-1]:
            x = block(x)
        return query.vit.blocks[-1].patches(x, query.vit.layout(x)).permute(0, 3, 1, 2)


def min_max(maps: Float[Tensor, "*k h w"]) -> Float[Tensor, "*k h w"]:
    """Maps scaled to 0..1; a constant map becomes zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / (high - low).clamp_min(torch.finfo(maps.dtype).tiny)


def token_weights(query: Query, masks: Float[Tensor, "s h w"]) -> Float[Tensor, "s n 1"]:
    """Masks over the map's grid as weights of the tokens; prefix tokens have weight one."""
    index = token_indices(query.vit, query.tokens)
    if masks.shape[-2:] != index.shape:
        size = tuple(index.shape)
        masks = F.interpolate(masks[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    weights = masks.new_ones(len(masks), query.tokens.shape[1])
    weights[:, index.flatten()] = masks.flatten(1)
    return weights[..., None]


def evaluate_soft_masks(
    query: Query,
    name: str,
    masks: Float[Tensor, "b r h w"],
    total: int,
    replacement: Float[Tensor, "b n d"] | None = None,
) -> Float[Tensor, "b done"]:
    """f with the tokens weighted by each mask, the rest taken from `replacement` (default: zero)."""
    layout = query.vit.layout(query.tokens)

    def run(part: slice) -> Tensor:
        some = masks[:, part]
        runs = some.shape[1]
        m = token_weights(query, some.flatten(0, 1))
        x = m * query.tokens.repeat_interleave(runs, 0)
        if replacement is not None:
            x = x + (1 - m) * replacement.repeat_interleave(runs, 0)
        logits = query.vit.logits(remember(x, layout))
        return explained_values(query, logits.unflatten(0, some.shape[:2]))

    return run_search(query, name, total, full_runs_per_step(query), run)


@register_method("scorecam", "model", cost=CHANNELS + 1.0, **BLACK_BOX)
def scorecam(query: Query, *, budget: int | None = None, softmax: bool = True) -> Float[Tensor, "b h w"]:
    """Channels weighted by the output with each as mask (Score-CAM; budget: none is every channel)."""
    a = channels(query)
    order = a.flatten(2).std(2).argsort(dim=1, descending=True, stable=True)
    a = a.gather(1, order[:, :, None, None].expand_as(a))
    f = evaluate_soft_masks(query, "scorecam", min_max(a), check_budget("scorecam", budget, 1, a.shape[1]))
    weight = f.softmax(1) if softmax else f
    return torch.einsum("bk,bkhw->bhw", weight.to(a), a[:, : f.shape[1]]).clamp_min(0)


@register_method("vit_cx", "model", cost=60.0, **BLACK_BOX)
def vit_cx(
    query: Query, *, budget: int | None = None, noise: float = 0.1, seed: int = 0
) -> Float[Tensor, "b h w"]:
    """Mean output over masks from clustered channels (ViT-CX; budget: none is every cluster)."""
    spread = query.tokens.flatten(1).std(1)[:, None, None]
    generators = image_generators(query.images, seed)
    draws = [
        torch.randn(x.shape, generator=g, dtype=torch.float64)
        for x, g in zip(query.tokens, generators, strict=True)
    ]
    replacement = noise * spread * torch.stack(draws).to(query.tokens)
    masks_of = [cluster_means(a) for a in min_max(channels(query))]
    longest = max(len(masks) for masks in masks_of)
    # padding with zero masks, which have no weight in either sum
    masks = torch.stack([F.pad(m, (0, 0, 0, 0, 0, longest - len(m))) for m in masks_of])
    f = evaluate_soft_masks(query, "vit_cx", masks, check_budget("vit_cx", budget, 1, longest), replacement)
    return mean_where_kept(f, masks[:, : f.shape[1]].to(f).flatten(2)).unflatten(1, masks.shape[-2:])


def cluster_means(maps: Float[Tensor, "k h w"]) -> Float[Tensor, "clusters h w"]:
    """The mean map of each cluster; the largest cluster first, ties by their first channel."""
    unit = F.normalize(maps.flatten(1).double().cpu(), dim=1)
    clusters = complete_linkage(1 - unit @ unit.T, DISTANCE)
    return torch.stack([maps[members].mean(0) for members in clusters])


def complete_linkage(distance: Float[Tensor, "k k"], limit: float) -> list[list[int]]:
    """Clusters whose members are all within `limit` of one another; the largest first, ties by first member.

    >>> complete_linkage(torch.tensor([[0.0, 9.0, 0.1], [9.0, 0.0, 9.0], [0.1, 9.0, 0.0]]), 0.5)
    [[0, 2], [1]]
    """
    if len(distance) == 1:
        return [[0]]
    rows, columns = np.triu_indices(len(distance), 1)
    labels = fcluster(linkage(distance.numpy()[rows, columns], "complete"), limit, "distance")
    clusters = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    return sorted(clusters, key=lambda members: (-len(members), members[0]))
