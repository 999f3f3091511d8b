"""Views of vision transformers: `adapt(model)` finds an adapter, checks its view once, and caches it.

Modules that `steadygaze.modules` inserted change the plan of their model; `mixes_tokens` marks them.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.target import outputs_of_task, own_task, task_of_outputs
from steadygaze.vit.contexts import without_autocast
from steadygaze.vit.extra_tokens import with_extra_tokens
from steadygaze.vit.registry import find_plan, known_from_outside
from steadygaze.vit.unsupported import refusal
from steadygaze.vit.view import Headless, Plan, ViT, check_weights, verify
from steadygaze.vit.wrapped import CustomForward, wrapped_plan

_VIEWS: "weakref.WeakValueDictionary[int, ViT]" = weakref.WeakValueDictionary()
# model -> the structure that was checked
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
# models whose forward pass is more than a plan
_OWN_FORWARD: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def adapt(model: Any, task: str | None = None, *, forward: Callable[[Any, Tensor], Any] | None = None) -> ViT:
    """View a vision transformer as embed -> blocks -> head.

    Args:
        model: A vision transformer of timm, transformers or torchvision, a module with one inside (a head of
            your own, normalization, LoRA, a LightningModule), one of a class known to `register_adapter`, or
            the result of `load_model`, `ask` or `zero_shot`.
        task: "classification", "multilabel" (independent labels) or "regression" (values). By default the
            task of `load_model`, or what the model's configuration states (`problem_type` of transformers),
            or classification.
        forward: How the model is called, if not by model(images): a function (model, images) -> logits
            (B, classes), or an output that holds them.

    Returns:
        The view. It is cached, and refers to the model, which stays as it is.

    Raises:
        UnsupportedModelError: If no adapter knows the model, or the view does not reproduce the model's own
            logits, which is checked once per model.

    Examples:
        >>> from steadygaze import load_model
        >>> vit = adapt(load_model("embedded"))
        >>> vit.grid, vit.prefix, vit.readout  # 8 x 8 patches and a class token, which feeds the head
        ((8, 8), 1, 'class')
    """
    if isinstance(model, ViT):
        return _with_task(model if forward is None else adapt(model.model, forward=forward), task)
    if task is None and not isinstance(model, nn.Module):
        task = getattr(model, "task", None)  # of `load_model`
    module = unwrapped(model)
    if forward is not None and isinstance(module, nn.Module):
        module = CustomForward(module, forward)
    return _with_task(_cached_view(module), task)


def _with_task(vit: ViT, task: str | None) -> ViT:
    """The view with outputs as the task has them."""
    outputs = vit.plan.outputs if task is None else outputs_of_task(task)
    return vit if outputs == vit.plan.outputs else replace(vit, plan=replace(vit.plan, outputs=outputs))


def _cached_view(model: Any) -> ViT:
    if isinstance(model, str | PathLike):
        raise UnsupportedModelError(
            f"expected a model, got the name {str(model)!r}. Load it first: sg.load_model({str(model)!r}). "
            "sg.explain takes the name itself."
        )
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"expected a torch.nn.Module of a vision transformer, got {type(model).__name__}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise UnsupportedModelError(
            "the model is on the meta device: its weights have shapes, but no values. Build it on a real "
            "device and load its weights, such as with sg.load_model."
        )
    parts = (*(id(m) for m in model.modules()), *(p.shape for p in model.parameters()))
    shape = hash(parts)  # another structure, or another image size, is another model
    view = _VIEWS.get(id(model))
    if view is not None and view.model is model and _CHECKED.get(model) == shape:
        return view
    with without_autocast(model):  # what a model caches must serve gradients later
        return _view(model, shape)


def _reduced(vit: ViT) -> tuple[Callable[..., ViT], tuple[Any, ...]]:
    # a plan refers to modules, so a copied or pickled view is a new view of the copied model
    return adapt, (vit.model, task_of_outputs(vit.plan.outputs))


copyreg.pickle(ViT, _reduced)


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
    check_weights(model)
    plan = find_plan(model)
    known = _CHECKED.get(model) == shape
    if plan is None or (known and model in _OWN_FORWARD):
        plan = wrapped_plan(model, plan, known=known)
    if plan is None:
        raise UnsupportedModelError(refusal(model))
    vit = _with_modules(model, plan)
    if not (known or plan.checked):
        vit = _checked(vit)
    _CHECKED[model] = shape
    _VIEWS[id(model)] = vit
    return vit


def _with_modules(model: nn.Module, plan: Plan) -> ViT:
    stated = own_task(model)
    if stated is not None and plan.outputs == "classes":
        plan = replace(plan, outputs=outputs_of_task(stated))
    return ViT(model, with_inserted(model, plan))


def _checked(vit: ViT) -> ViT:
    """The view, or that of the model's own forward pass, if that does more than its adapter knows."""
    try:
        verify(vit)
        return vit
    except UnsupportedModelError as error:
        if isinstance(vit.plan.head, Headless) or known_from_outside(vit.model):
            raise
        try:
            plan = wrapped_plan(vit.model, vit.plan)
            assert plan is not None
            own = _with_modules(vit.model, plan)
            verify(own)
        except UnsupportedModelError:
            raise error from None
        _OWN_FORWARD.add(vit.model)
        return own


def with_inserted(model: nn.Module, plan: Plan) -> Plan:
    """The plan of a model with inserted modules.

    Most mix patches on their grid: these can then be masked but not removed. Registers add tokens to the
    prefix. A block keeps its linear parts if nothing was inserted into its attention branch.
    """
    modules: list[Any] = [m for m in model.modules() if _is_inserted(m)]
    if not modules:
        return plan
    added = sum(getattr(m, "extra_tokens", 0) for m in modules)
    if added:
        plan = with_extra_tokens(plan, added)
    on_grid = any(not getattr(m, "any_tokens", False) for m in modules)
    names = dict.fromkeys(str(m.spec["module"]) for m in modules)
    return replace(
        plan,
        blocks=[_block(b) for b in plan.blocks],
        removable=plan.removable and not on_grid,
        mixed=plan.mixed or on_grid or added > 0,
        kind=f"{plan.kind} with {' and '.join(names)}",
    )


def _block(block: dict[str, Any]) -> dict[str, Any]:
    inside = [name for name, child in block["module"].named_children() if _is_inserted(child)]
    in_mlp = set(inside) <= {"cb_mlp", "registers", "register_neurons"}
    return block if in_mlp else {**block, "parts": None}


def _is_inserted(module: nn.Module) -> bool:
    return getattr(module, "mixes_tokens", False) is True
