"""Is the map stable under noise that is too weak to see? Max- and avg-sensitivity (Yeh et al. 2019).

    max_sensitivity = max over x' of ‖map(x') − map(x)‖ / ‖map(x)‖     avg_sensitivity: the mean over x'
    x' = x + U(−r, r) in each channel of each pixel, in normalized units

(docs/equations.md#stability)

| symbol | variable                                                            |
| r      | `RADIUS`, about one gray level                                      |
| x'     | `noisy_images`, `SAMPLES` of them; by the seed and the image's name |

Lower is better; 0 is a map that noise does not change. The norm is Euclidean. Neither is about truth: a map
that ignores the image is stable. Undefined for a map of zeros. The class that is explained stays the same.

Cost: every method explains `SAMPLES` more images, so a run costs `SAMPLES` + 1 times its explanations.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.faithfulness.inputs import Batch, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.seeding import image_seed

RADIUS, SAMPLES = 0.02, 10


def noisy_images(
    batch: Batch, sample: int, seed: int = 0, radius: float = RADIUS
) -> Float[Tensor, "b c h w"]:
    """The images with uniform noise in −radius..radius."""
    noise = []
    for b, image in enumerate(batch.images):
        generator = torch.Generator().manual_seed(image_seed(seed, f"noise:{sample}:{batch.name(b)}"))
        noise.append(2 * torch.rand(image.shape, generator=generator, dtype=torch.float64) - 1)
    return batch.images + radius * torch.stack(noise).to(batch.images)


def relative_change(
    maps: Float[Tensor, "m b gh gw"], again: Float[Tensor, "m b gh gw"]
) -> Float[Tensor, "m b"]:
    """‖again − maps‖ / ‖maps‖, NaN where a map is zero."""
    norm = maps.flatten(2).double().norm(dim=-1)
    change = (again.double() - maps.double()).flatten(2).norm(dim=-1)
    return change / norm.masked_fill(norm == 0, float("nan"))


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """Both metrics, from the same noisy images; `detail` is the change of each."""
    changes = []
    for sample in range(SAMPLES):
        again = given.explain_again(images=noisy_images(given.batch, sample, given.seed))
        changes.append(relative_change(given.maps, again))
    detail = torch.stack(changes, -1)
    return {
        "max_sensitivity": Values(detail.amax(-1), detail),
        "avg_sensitivity": Values(detail.mean(-1), detail),
    }


def _entry(name: str, kind: str) -> Metric:
    return Metric(
        name,
        "",
        "lower",
        0,
        summary=f"{kind} relative change of the map under weak uniform noise; {SAMPLES} more explanations by "
        "every method",
        family="stability",
        compute=compute,
        needs_explain=True,
    )


add_metrics([_entry("max_sensitivity", "largest"), _entry("avg_sensitivity", "mean")])
