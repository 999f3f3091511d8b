"""Sanity checks: a map must change when the model or the class does (Adebayo et al. 2018).

    randomization       1 − |ρ| between the maps before and after weights are shuffled, mean over a cascade:
                        the head, then also the last block, and so on down to the embedding. 0..1, higher is
                        better; 0 is a map that does not depend on the weights. `detail` is ρ at each step,
                        from the head down (docs/equations.md#randomization)
    class_sensitivity   ρ between the maps of the target and of the least likely class ("second": the second
                        most likely). −1..1, lower is better; 1 is a map that is the same for both classes
                        (docs/equations.md#class-sensitivity)
    agreement           mean ρ with the maps of the other methods. −1..1, no direction is better. `detail`
                        is ρ with each method; its mean over the images is the (M, M) matrix that
                        `agreement` returns (docs/equations.md#agreement)

ρ is Spearman's rank correlation over the patches. Shuffling permutes the entries of each parameter, which
keeps their scale and works for every architecture. It happens on a copy of the model.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.faithfulness.inputs import Explain, MetricInput
from steadygaze.faithfulness.localization import spearman
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.target import task_of_outputs
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT, remember


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
        shuffled_maps = _maps(explain, model, images, target, maps)
        correlations.append(spearman(maps.flatten(2), shuffled_maps.flatten(2)))
        for p, original in zip(group, originals, strict=False):
            p.data.copy_(original)
    detail = torch.stack(correlations, -1).nan_to_num(0.0)
    constant = (maps.flatten(2) == maps.flatten(2)[..., :1]).all(-1)
    return Values((1 - detail.abs()).mean(-1).masked_fill(constant, float("nan")), detail)


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
    return Values(spearman(maps.flatten(2), _maps(explain, model, images, classes, maps).flatten(2)))


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


def _maps(explain: Explain, model: nn.Module, images: Tensor, target: Tensor, like: Tensor) -> Tensor:
    maps = explain(model, images, target)
    if maps.shape != like.shape:
        expected, got = tuple(like.shape), tuple(maps.shape)
        raise InputError(f"explain: expected maps of shape {expected}, like those evaluated, got {got}")
    return maps.detach()


# -- registration


def _randomization(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    assert given.explain is not None
    images, target = given.batch.images, given.target
    return {
        "randomization": randomization(given.explain, given.vit, images, given.maps, target, seed=given.seed)
    }


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
