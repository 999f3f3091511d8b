"""Black-box methods that use the model's own channels as masks over the tokens: Score-CAM, ViT-CX and TIS.

A_k ∈ R^{h×w} is channel k of the patch tokens at the input of the last block, Ā_k the same scaled to 0..1;
x_j are the token embeddings (docs/equations.md#scorecam, docs/equations.md#vit-cx).

| name     | run                                                  | s_j                                    |
| scorecam | x_j Ā_kj for each channel k                          | relu Σ_k softmax_k(f_k − f(none)) A_kj |
| vit_cx   | m_j x_j + (1 − m_j) ε_j, m the mean Ā_k of a cluster | Σ_m f_m m_j / Σ_m m_j                  |
| tis      | the patches where a centroid of channels is highest  | Σ_m f_m m_j / Σ_m m_j, m ∈ {0, 1}      |

Wang et al. 2020 (Score-CAM), Xie et al. 2023 (ViT-CX), Englebert et al. 2023 (TIS; docs/equations.md#tis).

f(none) cancels in the softmax. `softmax=False` weights by f_k itself, as the authors' code of Score-CAM
does. Channels run in order of decreasing standard deviation, so that a small budget uses the most
informative ones. ε is noise with standard deviation `noise` x that of the tokens. Clusters: agglomerative,
complete linkage, cosine distance up to 0.1, largest first.

tis clusters the channels of all blocks' outputs, vectors over the patches, by k-means into 1,024 centroids;
the best half of the patches of each is kept, and the others are removed. The largest cluster comes first.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from steadygaze.errors import BrokenMapError, InputError
from steadygaze.methods.aggregate import min_max
from steadygaze.methods.perturbation import BLACK_BOX, mean_where_kept, to_grid
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import (
    check_budget,
    evaluate_subsets,
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
    if not torch.isfinite(x).all():
        raise BrokenMapError(
            "the model's hidden states have NaN or infinite values for these images, so they give no masks. "
            "Check that the images are normalized as the model expects."
        )
    return query.vit.blocks[-1].patches(x, query.vit.layout(x)).permute(0, 3, 1, 2)


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
    f = evaluate_soft_masks(
        query, "scorecam", min_max(a, (-2, -1)), check_budget("scorecam", budget, 1, a.shape[1])
    )
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
    masks_of = [cluster_means(a) for a in min_max(channels(query), (-2, -1))]
    longest = max(len(masks) for masks in masks_of)
    # padding with zero masks, which have no weight in either sum
    masks = torch.stack([F.pad(m, (0, 0, 0, 0, 0, longest - len(m))) for m in masks_of])
    f = evaluate_soft_masks(query, "vit_cx", masks, check_budget("vit_cx", budget, 1, longest), replacement)
    return mean_where_kept(f, masks[:, : f.shape[1]].to(f).flatten(2)).unflatten(1, masks.shape[-2:])


@register_method("tis", "model", cost=1024.0, reads_hidden=True, **BLACK_BOX)
def tis(
    query: Query,
    *,
    budget: int | None = None,
    clusters: int = 1024,
    keep: float = 0.5,
    seed: int = 0,
    hide: str = "auto",
) -> Float[Tensor, "b h w"]:
    """Mean output of masks from clustered channels of all layers (TIS; budget: none is every cluster).

    Args:
        clusters: Centroids of k-means.
        keep: Share of the patches that a mask keeps.
        seed: Random seed of the first centroids.
    """
    if not isinstance(clusters, int) or clusters < 1:
        raise InputError(f"tis: clusters must be an integer >= 1, got {clusters!r}")
    if not 0 < keep <= 1:
        raise InputError(f"tis: keep is the share of the patches that a mask keeps, in 0..1, got {keep!r}")
    count = max(1, int(keep * query.patches))
    generators = image_generators(query.images, seed)
    channels = zip(all_channels(query), generators, strict=True)
    centroids = [k_means(points, clusters, generator) for points, generator in channels]
    total = check_budget("tis", budget, 1, len(centroids[0]))
    order = torch.stack(centroids)[:, :total].argsort(dim=2, descending=True, stable=True)
    masks = torch.zeros(order.shape, dtype=torch.bool).scatter_(2, order[:, :, :count], True)
    f = evaluate_subsets(query, "tis", masks, hide)
    return to_grid(query, mean_where_kept(f, masks[:, : f.shape[1]].to(f)))


def all_channels(query: Query) -> Float[Tensor, "b k p"]:
    """The channels of the patches behind every block, on the map's grid."""
    layout, found = query.vit.layout(query.tokens), []
    for layer, x in enumerate(query.hidden[1:], start=1):
        maps = query.vit.patches(layer, x, layout).permute(0, 3, 1, 2).double().cpu()
        if tuple(maps.shape[-2:]) != query.grid:  # a stage of a hierarchical model
            maps = F.interpolate(maps, size=query.grid, mode="bilinear", align_corners=False)
        found.append(maps.flatten(2))
    return torch.cat(found, 1)


def k_means(
    points: Float[Tensor, "n p"], clusters: int, generator: torch.Generator, steps: int = 100
) -> Float[Tensor, "k p"]:
    """Centroids by Lloyd's algorithm from random points, until no point changes its cluster.

    The largest cluster comes first; one that became empty keeps its last centroid. With fewer points than
    clusters, the points themselves.
    """
    clusters = min(clusters, len(points))
    centroids = points[torch.randperm(len(points), generator=generator)[:clusters]]
    nearest = torch.full((len(points),), -1)
    for _ in range(steps):
        distance = centroids.pow(2).sum(1) - 2 * points @ centroids.T  # + |point|², the same for all
        before, nearest = nearest, distance.argmin(1)
        if torch.equal(before, nearest):
            break
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        sizes = nearest.bincount(minlength=clusters)
        centroids = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], centroids)
    sizes = nearest.bincount(minlength=clusters)
    order = sizes.argsort(descending=True, stable=True)
    return centroids[order]


def cluster_means(maps: Float[Tensor, "k h w"]) -> Float[Tensor, "clusters h w"]:
    """The mean map of each cluster; the largest cluster first, ties by their first channel."""
    unit = F.normalize(maps.flatten(1).double().cpu(), dim=1)
    clusters = complete_linkage(1 - unit @ unit.T, DISTANCE)
    return torch.stack([maps[members].mean(0) for members in clusters])


def complete_linkage(distance: Float[Tensor, "k k"], limit: float) -> list[list[int]]:
    """Clusters whose members are all within `limit` of one another; the largest first, ties by first member.

    Examples:
        >>> complete_linkage(torch.tensor([[0.0, 9.0, 0.1], [9.0, 0.0, 9.0], [0.1, 9.0, 0.0]]), 0.5)
        [[0, 2], [1]]
    """
    if len(distance) == 1:
        return [[0]]
    rows, columns = np.triu_indices(len(distance), 1)
    labels = fcluster(linkage(distance.numpy()[rows, columns], "complete"), limit, "distance")
    clusters = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    return sorted(clusters, key=lambda members: (-len(members), members[0]))
