"""`evaluate`: many metrics of many maps of one batch. Metrics that share a function are computed together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import BrokenMapError, InputError
from steadygaze.faithfulness.inputs import (
    RATIOS,
    Batch,
    CachedForward,
    Explain,
    MetricInput,
    at_least_float32,
)
from steadygaze.faithfulness.metric import Compute, Metric, Values, check_outputs, check_truth, metric
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT


class Evaluation(NamedTuple):
    """Values by the name of the metric, and a note for each: how patches were hidden, or what filled them.

    Examples:
        >>> Evaluation(values={}, notes={"deletion_aopc": "removal"}).notes["deletion_aopc"]
        'removal'
    """

    values: dict[str, Values]
    notes: dict[str, str]


def evaluate(
    vit: nn.Module | ViT,
    batch: Batch,
    maps: Float[Tensor, "m b gh gw"],
    metrics: Sequence[str],
    *,
    target: Int[Tensor, " b"] | None = None,
    seed: int = 0,
    ratios: Sequence[float] = RATIOS,
    fill: str = "zero",
    hide: str = "remove",
    explain: Explain | None = None,
    forward: CachedForward | None = None,
    unattributed: Float[Tensor, "m b"] | None = None,
    explained: Float[Tensor, "m b"] | None = None,
) -> Evaluation:
    """Measure M maps of the B images of `batch`. The model is left as it was.

    Args:
        vit (nn.Module | ViT): the model that the maps explain.
        batch (Batch): images with labels, and with masks and normalization for metrics that need them.
        maps (Tensor): (M, B, gh, gw), one map for each method and image, finite.
        metrics (Sequence[str]): names, as `list_metrics` gives them.
        target (Tensor): (B,), the class that the maps explain; by default the labels.
        seed (int): random seed; random numbers depend on it and the image's name only.
        ratios (Sequence[float]): shares of patches that token removal keeps or removes, increasing in 0..1.
        fill (str): "zero" (black), "mean", "blur" or "noise", for positive_perturbation,
            negative_perturbation and hide="paint".
        hide (str): how metrics of token removal hide patches: "remove", or "paint" their pixels with `fill`.
        explain (Callable): (model, images, target) -> maps (M, B, gh, gw) of the same methods; needed by
            metrics that explain again.
        forward (CachedForward): the model's run on the images, if it is known already.
        unattributed (Tensor): (M, B), for completeness: what each method gives to no patch; by default 0.
        explained (Tensor): (M, B), for completeness: the quantity that each map explains; by default the
            logit of the target.

    Returns:
        Evaluation: values (M, B) and notes by the name of the metric.

    Raises:
        InputError: if shapes do not match, or a metric needs masks or `explain` and there are none.
        BrokenMapError: if a map has NaN or infinite values.

    Examples:
        >>> import steadygaze as sg
        >>> loaded, images = sg.load_model("embedded"), torch.randn(1, 3, 32, 32)
        >>> batch = Batch(images, torch.tensor([3]))
        >>> maps = sg.explain(loaded, images, target=3).scores[None]  # (1 method, 1 image, 8, 8)
        >>> evaluate(loaded.model, batch, maps, ["deletion_aopc"]).values["deletion_aopc"].value.shape
        torch.Size([1, 1])
    """
    view = adapt(vit) if isinstance(vit, nn.Module) else vit
    chosen = {name: metric(name) for name in metrics}
    check_outputs(chosen.values(), view.plan.outputs)
    check_truth(chosen.values(), view.model)
    _check_needs(chosen.values(), batch, explain)
    with torch.no_grad(), evaluation_mode(view.model):
        forward = CachedForward(view, batch.images) if forward is None else forward
        _check_maps(forward, maps)
        target = (batch.labels if target is None else target).to(batch.images.device, torch.long)
        _check_target(target, batch, forward if any(m.uses_model for m in chosen.values()) else None)
    given = MetricInput(
        view,
        batch,
        at_least_float32(maps),
        target,
        forward,
        seed,
        tuple(ratios),
        fill,
        hide,
        explain,
        unattributed,
        explained,
    )
    together: dict[Compute, list[str]] = {}
    for entry in chosen.values():
        together.setdefault(entry.compute, []).append(entry.name)
    values: dict[str, Values] = {}
    for compute, names in together.items():
        if any(chosen[name].needs_explain for name in names):
            values |= compute(given, names)
            continue
        with torch.no_grad(), evaluation_mode(view.model):
            values |= compute(given, names)
    return Evaluation({name: values[name] for name in chosen}, {name: values[name].note for name in chosen})


def _check_needs(metrics: Iterable[Metric], batch: Batch, explain: Explain | None) -> None:
    without_masks = [m.name for m in metrics if m.needs_masks and batch.masks is None]
    if without_masks:
        raise InputError(f"{', '.join(without_masks)}: expected a batch with masks, got none")
    without_explain = [m.name for m in metrics if m.needs_explain and explain is None]
    if without_explain:
        raise InputError(
            f"{', '.join(without_explain)}: the method is run again, so evaluate needs "
            "explain=(model, images, target) -> maps"
        )


def _check_maps(forward: CachedForward, maps: Tensor) -> None:
    expected = (forward.images.shape[0], *forward.grid)
    if maps.dim() != 4 or tuple(maps.shape[1:]) != expected or maps.shape[0] == 0:
        raise InputError(f"maps: expected {('M', *expected)}, on the model's grid, got {tuple(maps.shape)}")
    if not torch.isfinite(maps).all():
        raise BrokenMapError("maps: a map has NaN or infinite values. Leave it out, or check its method.")


def _check_target(target: Tensor, batch: Batch, forward: CachedForward | None) -> None:
    if tuple(target.shape) != tuple(batch.labels.shape):
        raise InputError(f"target: expected {len(batch.labels)} classes, got shape {tuple(target.shape)}")
    if forward is not None:
        classes = forward.logits.shape[1]
        if int(target.min()) < 0 or int(target.max()) >= classes:
            got = f"{int(target.min())}..{int(target.max())}"
            raise InputError(f"target: classes must lie in 0..{classes - 1}, got {got}")
