"""Views of vision transformers. `adapt(model)` finds the adapter, checks the view against the model once, and caches it."""

import sys
import weakref
from typing import Any

import torch
from torch import nn

from steadygaze.errors import UnsupportedModel
from steadygaze.vit.inserted import with_inserted
from steadygaze.vit.view import Block, Layout, Parts, Plan, ViT, verify

__all__ = ["Block", "Layout", "Parts", "Plan", "ViT", "adapt"]

_VIEWS: "weakref.WeakValueDictionary[int, ViT]" = weakref.WeakValueDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()  # model -> its shape when checked


def adapt(model: Any) -> ViT:
    """A view of a timm, transformers or torchvision vision transformer.

    The view must give the model's own logits, or `UnsupportedModel` is raised; that is checked once for a model.
    """
    if isinstance(model, ViT):
        return model
    if isinstance(model, nn.Module):
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper, and those of parallel training, run the same modules
        model = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module of a vision transformer, got {type(model).__name__}")
    parts = (*(id(m) for m in model.modules()), *(p.shape for p in model.parameters()))
    shape = hash(parts)  # another structure, or another image size, is another model
    known = _VIEWS.get(id(model))
    if known is not None and known.model is model and _CHECKED.get(model) == shape:
        return known
    with torch.inference_mode(False):  # what a model caches on the way must serve gradients later
        return _view(model, shape)


def _view(model: nn.Module, shape: int) -> ViT:
    plan = _plan(model)
    if plan is None:
        raise UnsupportedModel(
            f"{type(model).__module__}.{type(model).__name__} is no vision transformer that steadygaze knows. It views ViTs of "
            f"timm, transformers and torchvision; `python -m benchmarks.coverage` and docs/models.md list them."
        )
    vit = ViT(model, with_inserted(model, plan))
    if _CHECKED.get(model) != shape:
        verify(vit)
        _CHECKED[model] = shape
    _VIEWS[id(model)] = vit
    return vit


def _plan(model: nn.Module) -> Plan | None:
    """Ask the adapter of each library that is loaded; a model of a library that was never imported cannot exist."""
    if "steadygaze.models" in sys.modules:
        from steadygaze.vit import added

        plan = added.plan(model)
        if plan is not None:
            return plan
    if "timm" in sys.modules:
        from steadygaze.vit import hierarchical, timm

        plan = timm.plan(model) or hierarchical.plan(model)
        if plan is not None:
            return plan
    if "transformers" in sys.modules:
        from steadygaze.vit import huggingface

        plan = huggingface.plan(model)
        if plan is not None:
            return plan
    if "torchvision" in sys.modules:
        from steadygaze.vit import torchvision

        return torchvision.plan(model)
    return None
