"""How concentrated a map is: sparseness and complexity (docs/equations.md#concentration).

    sparseness   Gini coefficient of |map| (Chalasani et al. 2020). 0..1, higher is better: 0 is a map of
                 equal scores, 1 − 1/P one with all relevance on one patch
    complexity   entropy of |map| / Σ |map| in nats (Bhatt et al. 2020). 0..log P, lower is better

They describe a map and need no model: a map may be concentrated and wrong. NaN for a map of zeros.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.faithfulness.inputs import MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics


def sparseness(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m b"]:
    """Gini coefficient of the absolute scores: Σ_i (2i − P − 1) v_i / (P Σ v), v sorted, i from 1."""
    v = maps.flatten(2).double().abs().sort(-1).values
    p = v.shape[-1]
    weight = 2 * torch.arange(1, p + 1, device=v.device, dtype=v.dtype) - p - 1
    return (weight * v).sum(-1) / (p * v.sum(-1))


def complexity(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m b"]:
    """Entropy of the shares of the absolute scores, in nats."""
    v = maps.flatten(2).double().abs()
    share = v / v.sum(-1, keepdim=True)
    return -torch.xlogy(share, share).sum(-1)


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """Both metrics."""
    return {"sparseness": Values(sparseness(given.maps)), "complexity": Values(complexity(given.maps))}


add_metrics(
    [
        Metric(
            "sparseness",
            "",
            "higher",
            0,
            1,
            summary="Gini coefficient of the absolute scores: how concentrated the map is, not whether it is "
            "true",
            family="concentration",
            by_map=True,
            compute=compute,
            uses_model=False,
        ),
        Metric(
            "complexity",
            "nats",
            "lower",
            0,
            summary="entropy of the absolute scores: how spread the map is, not whether it is true",
            family="concentration",
            by_map=True,
            compute=compute,
            uses_model=False,
        ),
    ]
)
