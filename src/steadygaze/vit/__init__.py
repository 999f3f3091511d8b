"""Views of vision transformers. `adapt(model)` finds the adapter, checks the view against the model once, and caches it."""

import sys
import weakref
from typing import Any

from torch import nn

from steadygaze.errors import UnsupportedModel
from steadygaze.vit.evaluation_mode import without_autocast
from steadygaze.vit.inserted_modules import with_inserted
from steadygaze.vit.view import Block, Layout, Parts, Plan, ViT, verify

__all__ = ["Block", "Layout", "Parts", "Plan", "ViT", "adapt"]

_VIEWS: "weakref.WeakValueDictionary[int, ViT]" = weakref.WeakValueDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, int]" = (
    weakref.WeakKeyDictionary()
)  # model -> its shape when checked


def adapt(model: Any) -> ViT:
    """A view of a timm, transformers or torchvision vision transformer.

    The view must give the model's own logits, or `UnsupportedModel` is raised; that is checked once for a model.
    """
    if isinstance(model, ViT):
        return model
    model = _unwrapped(model)
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"expected a torch.nn.Module of a vision transformer, got {type(model).__name__}"
        )
    parts = (*(id(m) for m in model.modules()), *(p.shape for p in model.parameters()))
    shape = hash(parts)  # another structure, or another image size, is another model
    known = _VIEWS.get(id(model))
    if known is not None and known.model is model and _CHECKED.get(model) == shape:
        return known
    with without_autocast(model):  # what a model caches on the way must serve gradients later
        return _view(model, shape)


def _unwrapped(model: Any) -> Any:
    """The module inside `load_model`'s result, torch.compile and parallel training, in any order."""
    while True:
        inner = getattr(model, "model", None)
        if isinstance(inner, nn.Module) and not isinstance(model, nn.Module):
            model = inner
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(model, nn.Module) and hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _view(model: nn.Module, shape: int) -> ViT:
    plan = _plan(model)
    if plan is None:
        inside = _inside(model)
        what = (
            f"It holds one: give model.get_submodule({inside!r}), and images as that is given them, normalised for example."
            if inside
            else "It views ViTs of timm, transformers and torchvision; `python -m benchmarks.coverage` and docs/models.md list them."
        )
        raise UnsupportedModel(
            f"{type(model).__module__}.{type(model).__name__} is no vision transformer that steadygaze knows. {what}"
        )
    vit = ViT(model, with_inserted(model, plan))
    if _CHECKED.get(model) != shape:
        verify(vit)
        _CHECKED[model] = shape
    _VIEWS[id(model)] = vit
    return vit


def _inside(model: nn.Module) -> str:
    """Where in a module a vision transformer is that can be viewed; empty if nowhere."""
    for name, inner in model.named_modules():
        try:
            if name and _plan(_unwrapped(inner)) is not None:
                return name
        except UnsupportedModel:
            continue
    return ""


def _plan(model: nn.Module) -> Plan | None:
    """Ask the adapter of each library that is loaded; a model of a library that was never imported cannot exist."""
    if "steadygaze.models" in sys.modules:
        from steadygaze.vit.adapters import steadygaze_models as added

        plan = added.plan(model)
        if plan is not None:
            return plan
    if "timm" in sys.modules:
        from steadygaze.vit.adapters import timm
        from steadygaze.vit.adapters import timm_hierarchical as hierarchical

        plan = timm.plan(model) or hierarchical.plan(model)
        if plan is not None:
            return plan
    if "transformers" in sys.modules:
        from steadygaze.vit.adapters import transformers as huggingface

        plan = huggingface.plan(model)
        if plan is not None:
            return plan
    if "torchvision" in sys.modules:
        from steadygaze.vit.adapters import torchvision

        return torchvision.plan(model)
    return None
