"""Sanity checks: a map must change when the model or the class does (Adebayo et al. 2018).

    randomization       1 − |ρ| between the maps before and after weights are shuffled, mean over a cascade:
                        the head, then also the last block, and so on down to the embedding. 0..1, higher is
                        better; 0 is a map that does not depend on the weights. `detail` is ρ at each step,
                        from the head down (docs/equations.md#randomization)
    efficient_randomization
                        (H(map of shuffled weights) − H(map)) / H(map), H the entropy of a map's histogram:
                        the map of a model without knowledge should be more complex. One more explanation,
                        higher is better (Hedström et al. 2023, docs/equations.md#mprt)
    smooth_randomization
                        1 − |ρ| between the maps of the model and of shuffled weights, each the mean over
                        noisy images, which removes the noise of the method from the comparison. 0..1, higher
                        is better (Hedström et al. 2023, docs/equations.md#mprt)
    class_sensitivity   ρ between the maps of the target and of the least likely class ("second": the second
                        most likely). −1..1, lower is better; 1 is a map that is the same for both classes
                        (docs/equations.md#class-sensitivity)
    agreement           mean ρ with the maps of the other methods. −1..1, no direction is better. `detail`
                        is ρ with each method; its mean over the images is the (M, M) matrix that
                        `agreement` returns (docs/equations.md#agreement)

ρ is Spearman's rank correlation over the patches. Shuffling permutes the entries of each parameter, which
keeps their scale and works for every architecture. It happens on a copy of the model. The last two of the
three shuffle all weights at once, as the last step of the cascade does.
"""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.faithfulness.inputs import Batch, Explain, MetricInput, maps_like
from steadygaze.faithfulness.localization import spearman
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.seeding import image_seed
from steadygaze.target import task_of_outputs
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT, remember

BINS = 100  # of histograms, for efficient_randomization
SAMPLES, NOISE = 10, 0.1  # noisy images, and their noise as a share of the range, for smooth_randomization


def randomization(
    explain: Explain,
    vit: ViT,
    images: Float[Tensor, "b c h w"],
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    *,
    seed: int = 0,
    cascade: bool = True,
) -> Values:
    """1 − |ρ| after the weights are shuffled, layer by layer.

    A constant map gives NaN; a map that becomes constant has changed (ρ = 0).

    Args:
        cascade: False shuffles one layer at a time and restores it before the next.
    """
    model = deepcopy(vit.model)
    correlations = []
    task = task_of_outputs(vit.plan.outputs)
    for index, group in enumerate(parameter_groups(adapt(model, task), images[:1])):
        originals = [] if cascade else [p.detach().clone() for p in group]
        shuffle(group, torch.Generator().manual_seed(seed * 1_000_003 + index))
        shuffled_maps = maps_like(maps, explain, model, images, target)
        correlations.append(spearman(maps.flatten(2), shuffled_maps.flatten(2)))
        for p, original in zip(group, originals, strict=False):
            p.data.copy_(original)
    detail = torch.stack(correlations, -1).nan_to_num(0.0)
    constant = (maps.flatten(2) == maps.flatten(2)[..., :1]).all(-1)
    return Values((1 - detail.abs()).mean(-1).masked_fill(constant, float("nan")), detail)


def fully_shuffled(vit: ViT, image: Float[Tensor, "1 c h w"], seed: int = 0) -> nn.Module:
    """A copy of the model with shuffled weights: that of the last step of `randomization`."""
    model = deepcopy(vit.model)
    for index, group in enumerate(parameter_groups(adapt(model, task_of_outputs(vit.plan.outputs)), image)):
        shuffle(group, torch.Generator().manual_seed(seed * 1_000_003 + index))
    return model


def histogram_entropy(maps: Float[Tensor, "m b gh gw"], bins: int = BINS) -> Float[Tensor, "m b"]:
    """Entropy in nats of each map's histogram, of equal bins from its lowest to its highest score."""
    flat = maps.detach().flatten(2).double().cpu().numpy()
    counts = np.stack([[np.histogram(scores, bins)[0] for scores in of_method] for of_method in flat])
    share = torch.from_numpy(counts / counts.sum(-1, keepdims=True)).to(maps.device)
    return -torch.xlogy(share, share).sum(-1)


def efficient_randomization(
    maps: Float[Tensor, "m b gh gw"], shuffled_maps: Float[Tensor, "m b gh gw"], bins: int = BINS
) -> Values:
    """Relative rise of the complexity of maps when the weights are shuffled; NaN for a constant map."""
    before, after = histogram_entropy(maps, bins), histogram_entropy(shuffled_maps, bins)
    return Values((after - before) / before.masked_fill(before == 0, float("nan")))


def smooth_randomization(
    maps: Float[Tensor, "m b gh gw"], shuffled_maps: Float[Tensor, "m b gh gw"]
) -> Values:
    """1 − |ρ| between maps that are means over noisy images; `detail` is ρ."""
    rho = spearman(maps.flatten(2), shuffled_maps.flatten(2)).nan_to_num(0.0)
    constant = (maps.flatten(2) == maps.flatten(2)[..., :1]).all(-1)
    return Values((1 - rho.abs()).masked_fill(constant, float("nan")), rho[..., None])


def gaussian_noise(batch: Batch, sample: int, seed: int = 0) -> Float[Tensor, "b c h w"]:
    """Images with Gaussian noise whose standard deviation is `NOISE` of each image's range."""
    noise = []
    for b, image in enumerate(batch.images):
        generator = torch.Generator().manual_seed(image_seed(seed, f"gaussian:{sample}:{batch.name(b)}"))
        noise.append(torch.randn(image.shape, generator=generator, dtype=torch.float64).to(image))
    spread = batch.images.flatten(1).amax(1) - batch.images.flatten(1).amin(1)
    return batch.images + NOISE * spread[:, None, None, None] * torch.stack(noise)


def class_sensitivity(
    explain: Explain,
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    logits: Float[Tensor, "b classes"],
    other: str = "least",
) -> Values:
    """ρ between the maps of the target and of another class.

    Args:
        other: The "least" likely class, or the "second" most likely one (the most likely besides the target).
    """
    if logits.shape[1] < 2:
        raise InputError("class_sensitivity: expected a model with at least two classes, got one")
    if other not in ("least", "second"):
        raise UnknownNameError("class to compare with", other, ("least", "second"))
    excluded = float("inf") if other == "least" else float("-inf")
    remaining = logits.scatter(1, target[:, None], excluded)
    classes = remaining.argmin(1) if other == "least" else remaining.argmax(1)
    return Values(spearman(maps.flatten(2), maps_like(maps, explain, model, images, classes).flatten(2)))


def agreement(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m m"]:
    """Mean rank correlation of each two methods over the images, 1 on the diagonal; ignores constant maps.

    Examples:
        >>> one = torch.arange(4.0).view(1, 1, 2, 2)
        >>> agreement(torch.cat([one, -one]))
        tensor([[ 1., -1.],
                [-1.,  1.]], dtype=torch.float64)
    """
    return _pairwise_correlations(maps).nanmean(2)


def agreement_by_image(maps: Float[Tensor, "m b gh gw"]) -> Values:
    """Mean rank correlation with the other methods, NaN for a single method; `detail`: with each method."""
    rho = _pairwise_correlations(maps)
    diagonal = torch.eye(len(maps), dtype=torch.bool, device=maps.device)[:, :, None]
    others = rho.masked_fill(diagonal, float("nan"))
    return Values(others.nanmean(1), rho.transpose(1, 2))


def _pairwise_correlations(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m m b"]:
    flat = maps.flatten(2)
    return torch.stack([spearman(one.expand_as(flat), flat) for one in flat])


def parameter_groups(vit: ViT, images: Float[Tensor, "b c h w"]) -> list[list[nn.Parameter]]:
    """Parameters of head, last block, ..., first block, embedding: those that each really uses, each once."""
    parameters = list(vit.model.parameters())
    with torch.enable_grad(), evaluation_mode(vit.model):
        for p in parameters:
            p.requires_grad_(p.is_floating_point())
        x = vit.embed(images)
        outputs = [x]
        for block in vit.blocks:
            x = block(remember(x.detach(), vit.layout(x)))
            outputs.append(x)
        outputs.append(vit.head(remember(x.detach(), vit.layout(x))))
        gradients = [torch.autograd.grad(y.sum(), parameters, allow_unused=True) for y in outputs]
    groups, grouped = [], set()
    for grads in reversed(gradients):
        used = [p for p, g in zip(parameters, grads, strict=True) if g is not None]
        group = [p for p in used if id(p) not in grouped]
        grouped |= {id(p) for p in group}
        groups.append(group)
    return [g for g in groups if g]


def shuffle(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    """Permute the entries of each parameter in place."""
    for p in parameters:
        order = torch.randperm(p.numel(), generator=generator).to(p.device)
        p.data.copy_(p.data.flatten()[order].view(p.shape))


# -- registration


def _randomization(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    assert given.explain is not None
    images, target = given.batch.images, given.target
    return {
        "randomization": randomization(given.explain, given.vit, images, given.maps, target, seed=given.seed)
    }


def _shuffled(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The metrics that shuffle all weights at once."""
    model = fully_shuffled(given.vit, given.batch.images[:1], given.seed)
    values = {}
    if "efficient_randomization" in names:
        values["efficient_randomization"] = efficient_randomization(given.maps, given.explain_again(model))
    if "smooth_randomization" in names:
        before, after = torch.zeros_like(given.maps), torch.zeros_like(given.maps)
        for sample in range(SAMPLES):
            images = gaussian_noise(given.batch, sample, given.seed)
            before += given.explain_again(images=images) / SAMPLES
            after += given.explain_again(model, images=images) / SAMPLES
        values["smooth_randomization"] = smooth_randomization(before, after)
    return values


def _class_sensitivity(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    assert given.explain is not None
    values = class_sensitivity(
        given.explain, given.vit.model, given.batch.images, given.maps, given.target, given.logits
    )
    return {"class_sensitivity": values}


def _agreement(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    return {"agreement": agreement_by_image(given.maps)}


SHUFFLED = "1 − |rank correlation| of the maps before and after weights are shuffled, mean over the cascade"
add_metrics(
    [
        Metric(
            "randomization",
            "",
            "higher",
            0,
            1,
            summary=SHUFFLED,
            family="sanity",
            compute=_randomization,
            needs_explain=True,
        ),
        Metric(
            "efficient_randomization",
            "",
            "higher",
            -1,
            summary="relative rise of the entropy of the map's histogram after all weights are shuffled; one "
            "more explanation by every method",
            family="sanity",
            compute=_shuffled,
            needs_explain=True,
        ),
        Metric(
            "smooth_randomization",
            "",
            "higher",
            0,
            1,
            summary="1 − |rank correlation| of the maps before and after all weights are shuffled, each the "
            f"mean over noisy images; {2 * SAMPLES} more explanations by every method",
            family="sanity",
            compute=_shuffled,
            needs_explain=True,
        ),
        Metric(
            "class_sensitivity",
            "",
            "lower",
            -1,
            1,
            summary="rank correlation of the maps of the target and of another class",
            family="sanity",
            compute=_class_sensitivity,
            needs_explain=True,
            outputs=("classes", "labels"),
        ),
        Metric(
            "agreement",
            "",
            "neither",
            -1,
            1,
            summary="mean rank correlation with the maps of the other methods of the run",
            family="sanity",
            compute=_agreement,
            detail_by_method=True,
        ),
    ]
)
