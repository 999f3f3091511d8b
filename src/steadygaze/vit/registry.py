"""The registry of adapters: how to view a model of some library as embed -> blocks -> head."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import nn

from steadygaze.notebook import Listing
from steadygaze.registry import Registry, is_built_in
from steadygaze.vit.view import Plan


@dataclass(frozen=True)
class Adapter:
    """Which models an adapter knows, and how it views them; `plan` may return None if it cannot."""

    name: str
    matches: Callable[[nn.Module], bool]
    plan: Callable[[Any], Plan | None]
    built_in: bool


@dataclass(frozen=True)
class AdapterInfo:
    """The public description of an adapter, as `list_adapters` gives it.

    Examples:
        >>> import steadygaze as sg
        >>> next(info.built_in for info in sg.list_adapters() if info.name == "timm")
        True
    """

    name: str
    summary: str
    built_in: bool


ADAPTERS: Registry[Adapter] = Registry("adapter", hint="sg.list_adapters() lists them.")
MODULES = {  # library -> the modules that register its adapters, imported once the library is
    "torchvision": ("steadygaze.vit.adapters.torchvision",),
    "transformers": (
        "steadygaze.vit.adapters.transformers",
        "steadygaze.vit.adapters.transformers_hierarchical",
    ),
    "timm": ("steadygaze.vit.adapters.timm", "steadygaze.vit.adapters.timm_hierarchical"),
    "open_clip": ("steadygaze.vit.adapters.open_clip",),
    "steadygaze.models": ("steadygaze.vit.adapters.steadygaze_models",),
    "torch": (  # these know classes by their names, and import no library
        "steadygaze.vit.adapters.dino",
        "steadygaze.vit.adapters.vit_pytorch",
        "steadygaze.vit.adapters.clip",
        "steadygaze.vit.adapters.monai",
    ),
}
PlanFunction = TypeVar("PlanFunction", bound=Callable[[Any], Plan | None])


def register_adapter(
    name: str,
    *,
    matches: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool],
    replace: bool = False,
) -> Callable[[PlanFunction], PlanFunction]:
    """Let `steadygaze.adapt`, and with it everything else, accept a model class of your own.

    Decorates a function `plan(model)` that returns a `Plan`, which describes embed, blocks and head by
    functions that call the model's own modules. The plan is checked on random images: the view must
    reproduce the model's logits, or `UnsupportedModelError` is raised. Adapters from outside the package
    are tried before its own, the last registered first.

    Args:
        name: Name of the adapter, as `list_adapters` shows it.
        matches: A class, several classes, or a function that returns whether a model is supported.
        replace: Replace an adapter that has this name, instead of raising `InputError`.

    Returns:
        The decorator. The decorated function may return None for a model that it cannot view after all.

    Examples:
        >>> import steadygaze as sg, torch
        >>> from torch import nn
        >>> from steadygaze.vit import Plan
        >>> class MyViT(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patches = nn.Conv2d(3, 32, 16, 16)
        ...         self.positions = nn.Parameter(torch.zeros(1, 4, 32))
        ...         layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)]
        ...         self.layers, self.classify = nn.ModuleList(layers), nn.Linear(32, 5)
        ...     def embed(self, images):
        ...         return self.patches(images).flatten(2).transpose(1, 2) + self.positions
        ...     def forward(self, images):
        ...         x = self.embed(images)
        ...         for layer in self.layers:
        ...             x = layer(x)
        ...         return self.classify(x.mean(1))
        >>> @sg.register_adapter("my_vit", matches=MyViT)
        ... def plan(model):
        ...     return Plan(
        ...         embed=lambda images: (model.embed(images), None, (2, 2)),  # tokens, state, grid
        ...         blocks=[{"module": b, "call": lambda x, layout, b=b: b(x)} for b in model.layers],
        ...         head=lambda x, layout: model.classify(x.mean(1)),
        ...         input_size=(3, 32, 32), fixed_size=True, grid=(2, 2),
        ...         prefix=0,  # class and register tokens before the patches
        ...         readout="mean", readout_rows=(),  # the head reads the mean of the patches
        ...         kind="MyViT",
        ...     )
        >>> sg.explain(MyViT(), torch.rand(1, 3, 32, 32), method="ixg").scores.shape
        torch.Size([1, 2, 2])
        >>> ADAPTERS.remove("my_vit")  # forget it again
    """
    classes: Any = matches
    test = (lambda model: isinstance(model, classes)) if isinstance(matches, (type, tuple)) else matches

    def decorate(plan: PlanFunction) -> PlanFunction:
        adapter = Adapter(name, test, plan, is_built_in(plan.__module__))
        ADAPTERS.add(name, adapter, origin=plan.__module__, replace=replace)
        return plan

    return decorate


def _import_adapters(is_present: Callable[[str], object]) -> None:
    for library, modules in MODULES.items():
        if is_present(library):
            for module in modules:
                import_module(module)


def list_adapters() -> Listing[AdapterInfo]:
    """All adapters of installed libraries, and those registered from outside; shows itself as a table.

    Examples:
        >>> import steadygaze as sg
        >>> "torchvision" in [info.name for info in sg.list_adapters()]
        True
    """
    _import_adapters(find_spec)
    infos = [
        AdapterInfo(adapter.name, (adapter.plan.__doc__ or "").strip().partition("\n")[0], adapter.built_in)
        for adapter in ADAPTERS.values()
    ]
    return Listing(infos, "adapters", ("name", "summary", "built_in"))


def find_plan(model: nn.Module) -> Plan | None:
    """The plan of the first adapter that knows the model; None if there is none."""
    _import_adapters(sys.modules.__contains__)  # a model of a library that is not imported cannot exist
    latest_first = list(ADAPTERS.values())[::-1]
    for adapter in sorted(latest_first, key=lambda adapter: adapter.built_in):
        if adapter.matches(model):
            plan = adapter.plan(model)
            if plan is not None:
                return plan
    return None


def known_from_outside(model: nn.Module) -> bool:
    """Whether an adapter from outside the package knows the model."""
    return any(adapter.matches(model) for adapter in ADAPTERS.values() if not adapter.built_in)
