"""Views of vision transformers: `adapt(model)` finds an adapter, checks its view once, and caches it."""

import weakref
from dataclasses import replace
from typing import Any

from torch import nn

from steadygaze.errors import UnsupportedModel
from steadygaze.target import outputs_of_task, own_task
from steadygaze.vit.adapter_registry import find_plan, register_adapter
from steadygaze.vit.evaluation_mode import without_autocast
from steadygaze.vit.inserted_modules import with_inserted
from steadygaze.vit.view import Block, Layout, Parts, Plan, ViT, verify

__all__ = ["Block", "Layout", "Parts", "Plan", "ViT", "adapt", "register_adapter", "unwrapped"]

_VIEWS: "weakref.WeakValueDictionary[int, ViT]" = weakref.WeakValueDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, int]" = (
    weakref.WeakKeyDictionary()
)  # model -> structure checked


def adapt(model: Any, task: str | None = None) -> ViT:
    """View a vision transformer as embed -> blocks -> head.

    model: a vision transformer of timm, transformers or torchvision, of a class known to
        `register_adapter`, or the result of `load_model`
    task: "classification", "multilabel" (independent labels) or "regression" (values). By default the task of
        `load_model`, or what the model's configuration states (`problem_type` of transformers), or
        classification

    The view must reproduce the model's own logits, or `UnsupportedModel` is raised; that is checked once
    per model.
    """
    if isinstance(model, ViT):
        return _with_task(model, task)
    if task is None and not isinstance(model, nn.Module):
        task = getattr(model, "task", None)  # of `load_model`
    return _with_task(_cached_view(unwrapped(model)), task)


def _with_task(vit: ViT, task: str | None) -> ViT:
    """The view with outputs as the task has them."""
    outputs = vit.plan.outputs if task is None else outputs_of_task(task)
    return vit if outputs == vit.plan.outputs else replace(vit, plan=replace(vit.plan, outputs=outputs))


def _cached_view(model: Any) -> ViT:
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"expected a torch.nn.Module of a vision transformer, got {type(model).__name__}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise UnsupportedModel(
            "the model is on the meta device: its weights have shapes, but no values. Build it on a real "
            "device and load its weights, such as with sg.load_model."
        )
    parts = (*(id(m) for m in model.modules()), *(p.shape for p in model.parameters()))
    shape = hash(parts)  # another structure, or another image size, is another model
    known = _VIEWS.get(id(model))
    if known is not None and known.model is model and _CHECKED.get(model) == shape:
        return known
    with without_autocast(model):  # what a model caches must serve gradients later
        return _view(model, shape)


def unwrapped(model: Any) -> Any:
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
    plan = find_plan(model)
    if plan is None:
        inside = _inside(model)
        advice = (
            f"It contains one: use model.get_submodule({inside!r}), with images preprocessed for that."
            if inside
            else "Supported are ViTs of timm, transformers and torchvision, listed in docs/models.md; "
            "register_adapter adds a class of your own."
        )
        raise UnsupportedModel(
            f"{type(model).__module__}.{type(model).__name__} is no vision transformer that steadygaze "
            f"knows. {advice}"
        )
    stated = own_task(model)
    if stated is not None and plan.outputs == "classes":
        plan = replace(plan, outputs=outputs_of_task(stated))
    vit = ViT(model, with_inserted(model, plan))
    if _CHECKED.get(model) != shape:
        if not plan.checked:
            verify(vit)
        _CHECKED[model] = shape
    _VIEWS[id(model)] = vit
    return vit


def _inside(model: nn.Module) -> str:
    """The name of a submodule that can be viewed; empty if there is none."""
    for name, inner in model.named_modules():
        try:
            if name and find_plan(unwrapped(inner)) is not None:
                return name
        except UnsupportedModel:
            continue
    return ""
