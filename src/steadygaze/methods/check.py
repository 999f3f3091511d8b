"""Removal curves of the images that were just explained, against random orders: `explain(..., check=True)`.

Equations: docs/equations.md#removal-check. The definitions are those of `verify`
(docs/equations.md#token-removal); what is different is the cost, about ten forward passes. The order of a map
costs five: it is measured at five ratios, in runs of 10 % to 90 % of the tokens, twice. A random order costs
three: it is measured at every second ratio. Random orders are measured once for all methods and targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.results.attribution import Attribution
from steadygaze.results.check import RemovalCheck, area
from steadygaze.target import Outputs, at_least_float32, predictions
from steadygaze.vit.clean_forward import CleanForward
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.removal import available_hiding, ranking, subset_logits

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)  # symmetric: insertion at r and deletion at 1 − r remove as many patches
RANDOM_ORDERS = 2
SEED = 0


def with_checks(
    clean: CleanForward, attributions: Mapping[str, Attribution], target: Any
) -> dict[str, Attribution]:
    """The attributions of one batch with their `check`. target: as `explain_batch` took it."""
    vit = clean.vit
    first = next(iter(attributions.values()))
    patches = first.grid[0] * first.grid[1]
    ratios = tuple(
        r for r, mirrored in zip(RATIOS, reversed(RATIOS), strict=True) if int(min(r, mirrored) * patches) > 0
    )
    if not ratios:
        raise InputError("check: expected an image of at least 2 patches, got 1: no patch can be removed.")
    several = first.scores.dim() == 4
    outputs: Outputs = "values" if first.target is None else first.outputs

    def read(logits: Float[Tensor, "s b c"]) -> Float[Tensor, "s b"] | Float[Tensor, "s b k"]:
        """The probability of the class, the value, or what a callable target makes of the logits."""
        if first.target is None:
            return torch.stack([at_least_float32(target(one)) for one in logits])
        numbers = predictions(first.outputs, at_least_float32(logits))
        classes = first.target if several else first.target[:, None]
        chosen = numbers.gather(2, classes.expand(len(logits), -1, -1))
        return chosen if several else chosen[..., 0]

    def curves(order: Int[Tensor, "b p"], ratios: Sequence[float] = ratios) -> tuple[Tensor, Tensor]:
        """Insertion and deletion, ratios last: (B, R), or (B, K, R) for all targets."""
        rank = order.argsort(-1)
        counts = torch.tensor([int(r * patches) for r in ratios], device=rank.device)
        top = rank < counts[:, None, None]
        keep = torch.stack([top, ~top]).flatten(0, 2)  # (2 · R · B, P)
        image = torch.arange(len(rank), device=rank.device).repeat(2 * len(ratios))
        logits = subset_logits(vit, clean.images, clean.tokens, keep, image, hiding)
        values = read(logits.view(2 * len(ratios), len(rank), -1))
        insertion, deletion = values.unflatten(0, (2, len(ratios))).movedim(1, -1)
        return insertion, deletion

    with torch.no_grad(), without_autocast(vit.model), evaluation_mode(vit.model):
        hiding = available_hiding(vit, clean.tokens)
        whole = read(first.logits[None])[0]
        generator = torch.Generator().manual_seed(SEED)
        chance, spread = torch.zeros_like(whole)[..., None], torch.zeros_like(whole)
        fewer = ratios[::2]
        for _ in range(RANDOM_ORDERS):
            order = torch.randperm(patches, generator=generator).to(whole.device)
            insertion, deletion = curves(order.expand(len(first), -1), fewer)
            chance = chance + (insertion.flip(-1) + deletion) / (2 * RANDOM_ORDERS)
            gain = (area(insertion, fewer) - area(deletion, fewer)) / 2
            spread = torch.maximum(spread, gain.abs().to(spread))
        chance = _with_midpoints(chance)
        checked = {}
        for name, attribution in attributions.items():
            orders = ranking(attribution.scores)
            if several:
                of_each = [curves(order) for order in orders.unbind(1)]
                insertion, deletion = (
                    torch.stack([pair[kind][:, k] for k, pair in enumerate(of_each)], 1) for kind in (0, 1)
                )
            else:
                insertion, deletion = curves(orders)
            check = RemovalCheck(ratios, whole, insertion, deletion, chance, spread, patches, hiding, outputs)
            checked[name] = replace(attribution, check=check)
    return checked


def _with_midpoints(curve: Float[Tensor, "*b s"]) -> Float[Tensor, "*b r"]:
    """The curve at all ratios, from every second one; they are equally spaced.

    >>> _with_midpoints(torch.tensor([1.0, 0.5, 0.0])).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    between = (curve[..., :-1] + curve[..., 1:]) / 2
    pairs = torch.stack([curve[..., :-1], between], -1).flatten(-2)
    return torch.cat([pairs, curve[..., -1:]], -1)
