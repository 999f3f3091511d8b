"""Sanity: a map must change when the model or the class does (Adebayo et al. 2018), and methods may be compared.

    randomisation       1 − |ρ| between the maps before and after weights are lost, mean over a cascade: the head is shuffled,
                        then the last block too, and so on down to the embedding. 0..1, higher is better: 0 is a map that does
                        not depend on the weights. `detail` is ρ at each step, from the head down
    class_sensitivity   ρ between the maps of the target and of the class the model finds least likely ("second": second likeliest).
                        −1..1, lower is better: 1 is a map that is the same for every class
    agreement           mean ρ with the maps of the other methods. −1..1, neither is better. `detail` is ρ with each method, so that
                        the mean of the rows over the images is the matrix that `agreement` gives, (M, M)

ρ is Spearman's rank correlation over the patches. Shuffled: a parameter keeps its values, in random order, so that scales stay
plausible and every architecture can be served. It happens on a copy of the model; the model itself is not touched.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.faithfulness.inputs import Explain, MetricInput
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.faithfulness.ranks import spearman
from steadygaze.vit import ViT, adapt
from steadygaze.vit.view import remember, undisturbed

def randomisation(
    explain: Explain,
    vit: ViT,
    images: Float[Tensor, "b c h w"],
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    *,
    seed: int = 0,
    cascade: bool = True,
) -> Values:
    """1 − |ρ| after the weights are shuffled, layer by layer. cascade=False: each layer alone, the others as they were.

    A map that is constant is NaN; one that becomes constant has changed (ρ = 0).
    """
    copy = deepcopy(vit.model)
    groups = layers(adapt(copy), images[:1])
    rho = []
    for index, group in enumerate(groups):
        kept = [] if cascade else [p.detach().clone() for p in group]
        shuffle(group, torch.Generator().manual_seed(seed * 1_000_003 + index))
        rho.append(spearman(maps.flatten(2), _maps(explain, copy, images, target, maps).flatten(2)))
        for p, old in zip(group, kept, strict=False):
            p.data.copy_(old)
    detail = torch.stack(rho, -1).nan_to_num(0.0)
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
    """ρ between the maps of the target and of another class: the "least" likely one, or the likeliest "second" one."""
    if logits.shape[1] < 2:
        raise BadInput("class_sensitivity: expected a model of at least two classes, got one")
    if other not in ("least", "second"):
        raise UnknownName("class to compare with", other, ("least", "second"))
    rest = logits.scatter(1, target[:, None], float("inf") if other == "least" else float("-inf"))
    second = rest.argmin(1) if other == "least" else rest.argmax(1)
    return Values(spearman(maps.flatten(2), _maps(explain, model, images, second, maps).flatten(2)))


def agreement(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m m"]:
    """Mean rank correlation between each two methods over the images, 1 on the diagonal; constant maps are left out."""
    return _alike(maps).nanmean(2)


def agreement_by_image(maps: Float[Tensor, "m b gh gw"]) -> Values:
    """Mean rank correlation with the other methods, NaN for one method alone; detail: with each, in their order."""
    rho = _alike(maps)
    others = rho.masked_fill(
        torch.eye(len(maps), dtype=torch.bool, device=maps.device)[:, :, None], float("nan")
    )
    return Values(others.nanmean(1), rho.transpose(1, 2))


def _alike(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m m b"]:
    flat = maps.flatten(2)
    return torch.stack([spearman(one.expand_as(flat), flat) for one in flat])


def layers(vit: ViT, images: Float[Tensor, "b c h w"]) -> list[list[nn.Parameter]]:
    """The parameters of head, last block, ..., first block, embedding: those that each of them really uses, each once."""
    parameters = list(vit.model.parameters())
    with torch.enable_grad(), undisturbed(vit.model):
        for p in parameters:
            p.requires_grad_(p.is_floating_point())
        x = vit.embed(images)
        steps = [x]
        for block in vit.blocks:
            x = block(remember(x.detach(), vit.layout(x)))
            steps.append(x)
        steps.append(vit.head(remember(x.detach(), vit.layout(x))))
        used = [torch.autograd.grad(y.sum(), parameters, allow_unused=True) for y in steps]
    groups, seen = [], set()
    for grads in reversed(used):
        group = [p for p, g in zip(parameters, grads, strict=True) if g is not None and id(p) not in seen]
        seen |= {id(p) for p in group}
        groups.append(group)
    return [g for g in groups if g]


def shuffle(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    """Put the entries of each parameter into random order, in place."""
    for p in parameters:
        order = torch.randperm(p.numel(), generator=generator).to(p.device)
        p.data.copy_(p.data.flatten()[order].view(p.shape))


def _maps(explain: Explain, model: nn.Module, images: Tensor, target: Tensor, like: Tensor) -> Tensor:
    maps = explain(model, images, target)
    if maps.shape != like.shape:
        raise BadInput(
            f"explain: expected maps of shape {tuple(like.shape)}, as those that are measured, got {tuple(maps.shape)}"
        )
    return maps.detach()


# -- registration ------------------------------------------------------------------------------------------------------


def _randomisation(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    assert given.explain is not None
    images, target = given.batch.images, given.target
    return {"randomisation": randomisation(given.explain, given.vit, images, given.maps, target, seed=given.seed)}


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
            "randomisation",
            "",
            "higher",
            0,
            1,
            summary=SHUFFLED,
            family="sanity",
            compute=_randomisation,
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
