"""`evaluate`: many measures of many maps of one batch. Each family runs once for all its measures and all maps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import BadInput, BrokenMap
from steadygaze.faithfulness import localisation, perturbation, removal, sanity, truth
from steadygaze.faithfulness.metric import Batch, Values, metric
from steadygaze.faithfulness.sanity import Explain
from steadygaze.vit import ViT, adapt
from steadygaze.vit.view import evaluation_mode


class Evaluation(NamedTuple):
    """Values by the name of the measure, and a note for each: how patches were hidden, or what filled them."""

    values: dict[str, Values]
    notes: dict[str, str]


def evaluate(vit: nn.Module | ViT, batch: Batch, maps: Float[Tensor, "m b gh gw"], metrics: Sequence[str], *,
             target: Int[Tensor, " b"] | None = None, seed: int = 0, ratios: Sequence[float] = removal.RATIOS,
             fill: str = "zero", explain: Explain | None = None) -> Evaluation:  # fmt: skip
    """Measure M maps of the B images of `batch`.

    target: the class that the maps explain; None is the label. ratios: of token removal. fill: "zero" (black), "mean", "blur" or
    "noise", for positive_perturbation and negative_perturbation. explain: (model, images, target) -> maps (M, B, gh, gw), the M
    methods in the same order; the sanity measures need it. Random numbers depend on `seed` and the image's name alone. The
    model is left as it was.
    """
    view = adapt(vit) if isinstance(vit, nn.Module) else vit
    chosen = {name: metric(name) for name in metrics}
    families = dict.fromkeys(m.family for m in chosen.values())
    lacking = [m.name for m in chosen.values() if m.masks and batch.masks is None]
    if lacking:
        raise BadInput(
            f"{', '.join(lacking)}: expected a batch with masks, got none. Give masks, or leave these measures out."
        )
    rerun = [m.name for m in chosen.values() if m.explains and explain is None]
    if rerun:
        raise BadInput(
            f"{', '.join(rerun)}: the method is run again, so evaluate needs explain=(model, images, target) -> maps"
        )
    found: dict[str, Values] = {}
    notes = dict.fromkeys(chosen, "")
    with torch.no_grad(), evaluation_mode(view.model):
        whole = removal.CachedForward(view, batch.images)
        _check(whole, maps)
        maps = removal.at_least_float32(maps)
        target = (batch.labels if target is None else target).to(batch.images.device, torch.long)
        _check_target(target, batch, whole if set(families) - {"localisation", "truth"} else None)
        if "removal" in families:
            found |= removal.removal(whole, maps, target, ratios)
            how = "removal" if view.plan.removable else "attention masking"
            notes |= dict.fromkeys((n for n, m in chosen.items() if m.family == "removal"), how)
        if "perturbation" in families:
            found |= perturbation.perturbation(whole, batch, maps, target, list(chosen), seed=seed, fill=fill)
            notes |= {
                n: fill if n.endswith("_perturbation") else "noise"
                for n, m in chosen.items()
                if m.family == "perturbation"
            }
        if "localisation" in families:
            assert batch.masks is not None
            found |= localisation.localisation(maps, batch.masks, list(chosen))
        if "truth" in families:
            assert batch.masks is not None
            found |= truth.truth(maps, batch.masks)
        logits = whole.logits if "class_sensitivity" in chosen else None
    if "agreement" in chosen:
        found["agreement"] = sanity.agreement_by_image(maps)
    if "class_sensitivity" in chosen:
        assert explain is not None and logits is not None
        found["class_sensitivity"] = sanity.class_sensitivity(
            explain, view.model, batch.images, maps, target, logits
        )
    if "randomisation" in chosen:
        assert explain is not None
        found["randomisation"] = sanity.randomisation(explain, view, batch.images, maps, target, seed=seed)
    return Evaluation({name: found[name] for name in chosen}, notes)


def _check(whole: removal.CachedForward, maps: Tensor) -> None:
    expected = (whole.images.shape[0], *whole.grid)
    if maps.dim() != 4 or tuple(maps.shape[1:]) != expected or maps.shape[0] == 0:
        raise BadInput(
            f"maps: expected {('M', *expected)}, M maps of these images on the model's grid, got {tuple(maps.shape)}"
        )
    if not torch.isfinite(maps).all():
        raise BrokenMap(
            "maps: a map has NaN or infinite values. Leave it out, or look at the method that made it."
        )


def _check_target(target: Tensor, batch: Batch, whole: removal.CachedForward | None) -> None:
    if tuple(target.shape) != tuple(batch.labels.shape):
        raise BadInput(
            f"target: expected one class for each of {len(batch.labels)} images, got shape {tuple(target.shape)}"
        )
    if whole is not None:
        classes = whole.logits.shape[1]
        if int(target.min()) < 0 or int(target.max()) >= classes:
            raise BadInput(
                f"target: classes must lie in 0..{classes - 1}, got {int(target.min())}..{int(target.max())}"
            )
