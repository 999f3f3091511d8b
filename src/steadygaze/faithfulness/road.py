"""ROAD: pixels are removed by noisy linear imputation, so that the mask itself shows less (Rong et al. 2022).

A hidden pixel u_i becomes the weighted mean of its neighbors, which may be hidden too: a sparse linear system
(docs/equations.md#road). With w = 1/6 for the four direct and 1/12 for the four diagonal neighbors inside the
image, a little noise is added to the solution:

    Σ_{j ~ i} w_ij (u_i − u_j) = 0  for every hidden pixel i;   u_j = x_j where j is not hidden

    road = mean over the ratios r of accuracy without the int(r·P) least − without the most relevant patches

In points, −100..100, higher is better, 0 for a random map. Patches are hidden whole, the same ones as by
token removal, so that a difference from it is one of imputation. `detail` holds both accuracies at every
ratio: most relevant first, then least relevant first.

| symbol | variable            |
| w      | `NEIGHBORS`         |
| noise  | `NOISE`, its standard deviation in normalized units |

Cost: 2R forward passes for each map, and as many sparse systems, which are solved on the CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import splu
from torch import Tensor

from steadygaze.faithfulness.inputs import Batch, CachedForward, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.faithfulness.removal import checked_ratios
from steadygaze.seeding import image_seed
from steadygaze.vit.removal import ranking, to_pixels

NOISE = 0.01
DIRECT, DIAGONAL = 1 / 6, 1 / 12
NEIGHBORS = tuple(
    (dy, dx, DIAGONAL if dy and dx else DIRECT) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx
)


def impute(image: Float[Tensor, "c h w"], hidden: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    """The image with hidden pixels interpolated from those that are not; zeros if all are hidden.

    Examples:
        >>> ramp = torch.arange(5.0).expand(1, 5, 5)
        >>> hidden = torch.zeros(5, 5, dtype=torch.bool)
        >>> hidden[2, 2] = True
        >>> impute(ramp, hidden)[0, 2].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if bool(hidden.all()):
        return torch.zeros_like(image)
    pixels = image.detach().cpu().double().numpy().copy()
    height, width = hidden.shape
    y, x = hidden.cpu().numpy().nonzero()
    unknowns = len(y)
    number = np.full((height, width), -1)  # of the unknown; -1: the pixel is seen
    number[y, x] = np.arange(unknowns)
    diagonal, known = np.zeros(unknowns), np.zeros((unknowns, len(pixels)))
    rows, columns, weights = [np.arange(unknowns)], [np.arange(unknowns)], [diagonal]
    for dy, dx, weight in NEIGHBORS:
        near_y, near_x = y + dy, x + dx
        (inside,) = ((near_y >= 0) & (near_y < height) & (near_x >= 0) & (near_x < width)).nonzero()
        near_y, near_x = near_y[inside], near_x[inside]
        diagonal[inside] += weight
        near = number[near_y, near_x]
        seen = near < 0
        known[inside[seen]] += weight * pixels[:, near_y[seen], near_x[seen]].T
        rows.append(inside[~seen])
        columns.append(near[~seen])
        weights.append(np.full((~seen).sum(), -weight))
    entries = np.concatenate(weights), (np.concatenate(rows), np.concatenate(columns))
    system = csc_matrix(entries, (unknowns, unknowns))  # symmetric, and diagonally dominant
    factors = splu(system, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    pixels[:, y, x] = factors.solve(known).T
    return torch.from_numpy(pixels).to(image)


def road(
    whole: CachedForward,
    batch: Batch,
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    ratios: Sequence[float],
    seed: int = 0,
    noise: float = NOISE,
) -> Values:
    """Accuracy lost with the most relevant patches, beyond that with the least relevant ones."""
    ratios = checked_ratios(ratios)
    order = ranking(maps)
    m, b, p = order.shape
    correct = maps.new_empty(m, b, 2, len(ratios))
    for i in range(b):
        generator = torch.Generator().manual_seed(image_seed(seed, f"road:{batch.name(i)}"))
        added = noise * torch.randn(whole.images.shape[1:], generator=generator, dtype=torch.float64)
        added = added.to(whole.images)
        for k in range(m):
            first = [order[k, i], order[k, i].flip(0)]  # most, then least relevant first
            kept = torch.ones(2, len(ratios), p, dtype=torch.bool, device=maps.device)
            for kind, patches in enumerate(first):
                for index, ratio in enumerate(ratios):
                    kept[kind, index, patches[: int(ratio * p)]] = False
            hidden = to_pixels(kept.flatten(0, 1).unflatten(1, whole.grid), whole.images)[:, 0] == 0
            filled = torch.stack([impute(whole.images[i], one) for one in hidden])
            filled = torch.where(hidden[:, None], filled + added, filled)
            logits = torch.cat([whole.vit(some) for some in filled.split(whole.images_at_once)])
            image = torch.full((len(logits),), i, device=target.device)
            found = whole.as_expected(logits, target[image], image)
            correct[k, i] = 100 * found.view(2, len(ratios)).to(correct)
    most, least = correct.mean(-1).unbind(-1)
    return Values(least - most, correct.flatten(2), "imputed")


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The metric `road`."""
    values = road(given.forward, given.batch, given.maps, given.target, given.ratios, given.seed)
    return {"road": values}


add_metrics(
    [
        Metric(
            "road",
            "%",
            "higher",
            -100,
            100,
            label="ROAD",
            summary="correct predictions without the least minus without the most relevant patches, which "
            "are imputed from their neighbors; mean over the ratios",
            family="perturbation",
            by_map=True,
            compute=compute,
            outputs=("classes", "labels"),
        )
    ]
)
