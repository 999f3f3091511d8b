"""Single deletion score: does a map order the patches as removing them one at a time does?

R. Hesse, S. Schaub-Meyer, S. Roth: Benchmarking the Attribution Quality of Vision Models, NeurIPS 2024
(docs/equations.md#single-deletion):

    single_deletion = Spearman correlation over the patches j of m_j and f(x) − f(x without patch j)

f is the logit of the explained class. The paper's IDSDS is this score of a model that was fine-tuned with
deleted patches, so that an image without one of them is in its domain. Here a patch is removed as a token,
which models trained with patch dropout have seen; the paper paints it with a baseline color.

| symbol | meaning                         | in code   |
| m      | map                             | `maps`    |
| f      | logit of the explained class    | `whole`   |
| f(x∖j) | the same without patch j        | `without` |
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.faithfulness.inputs import CachedForward, MetricInput, at_least_float32
from steadygaze.faithfulness.localization import spearman
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.vit.removal import HidingMode, subset_logits


def deletion_effects(forward: CachedForward, target: Int[Tensor, " b"]) -> Float[Tensor, "b p"]:
    """f(x) − f(x without patch j) for each patch, by removing its token."""
    vit, images = forward.vit, forward.images
    b, p = len(images), forward.grid[0] * forward.grid[1]
    keep = ~torch.eye(p, dtype=torch.bool, device=images.device).repeat(b, 1)
    image = torch.arange(b, device=images.device).repeat_interleave(p)
    mode: HidingMode = "remove" if vit.plan.removable else "mask"
    logits = subset_logits(vit, images, forward.tokens, keep, image, mode)
    without = at_least_float32(logits).gather(1, target[image][:, None]).view(b, p)
    whole = at_least_float32(forward.logits).gather(1, target[:, None])
    return whole - without


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The effects of all single deletions, once for all maps."""
    effects = deletion_effects(given.forward, given.target)
    maps = given.maps.flatten(2)
    note = "removal" if given.vit.plan.removable else "attention masking"
    return {"single_deletion": Values(spearman(maps, effects.expand(maps.shape)), note=note)}


add_metrics(
    [
        Metric(
            "single_deletion",
            "",
            "higher",
            -1,
            1,
            summary="rank correlation with the loss of the logit when each patch alone is removed; IDSDS if "
            "the model was trained with removed patches",
            family="magnitude",
            compute=compute,
        )
    ]
)
