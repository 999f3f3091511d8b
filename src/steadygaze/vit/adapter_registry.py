"""The registry of adapters: how to view a model of some library as embed -> blocks -> head."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from steadygaze.registry import Registry
from steadygaze.vit.view import Plan


@dataclass(frozen=True)
class Adapter:
    """Which models an adapter knows, and how it views them; `plan` may return None if it cannot."""

    name: str
    matches: Callable[[nn.Module], bool]
    plan: Callable[[Any], Plan | None]
    built_in: bool = False


ADAPTERS: Registry[Adapter] = Registry("adapter")


def register_adapter(
    name: str,
    *,
    matches: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool],
    plan: Callable[[Any], Plan | None],
    replace: bool = False,
) -> None:
    """Let `steadygaze.adapt`, and with it everything else, accept a model class of your own.

    >>> import steadygaze as sg, torch
    >>> from torch import nn
    >>> from steadygaze.vit import Plan
    >>> class MyViT(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.patches = nn.Conv2d(3, 32, 16, 16)
    ...         self.positions = nn.Parameter(torch.zeros(1, 4, 32))
    ...         layer = lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
    ...         self.layers, self.classify = nn.ModuleList([layer(), layer()]), nn.Linear(32, 5)
    ...     def embed(self, images):
    ...         return self.patches(images).flatten(2).transpose(1, 2) + self.positions
    ...     def forward(self, images):
    ...         x = self.embed(images)
    ...         for layer in self.layers:
    ...             x = layer(x)
    ...         return self.classify(x.mean(1))
    >>> def plan(model):
    ...     return Plan(
    ...         embed=lambda images: (model.embed(images), None, (2, 2)),  # tokens, state, grid
    ...         blocks=[{"module": b, "call": lambda x, layout, b=b: b(x)} for b in model.layers],
    ...         head=lambda x, layout: model.classify(x.mean(1)),
    ...         input_size=(3, 32, 32), fixed_size=True, grid=(2, 2),
    ...         prefix=0,  # class and register tokens before the patches
    ...         readout="mean", readout_rows=(),  # the head reads the mean of the patches
    ...         kind="MyViT",
    ...     )
    >>> sg.register_adapter("my_vit", matches=MyViT, plan=plan)
    >>> sg.explain(MyViT(), torch.rand(1, 3, 32, 32), method="ixg").scores.shape
    torch.Size([1, 2, 2])
    >>> ADAPTERS.remove("my_vit")  # forget it again

    matches: a class, several, or a function that tells whether a model is meant plan: model -> `Plan`,
    which describes embed, blocks and head by functions that call the model's own modules. It is
        checked on random images: the view must reproduce the model's logits, or `UnsupportedModel` is raised.

    Adapters from outside the package are tried before its own, the last registered first.
    """
    test = _is_instance(matches) if isinstance(matches, (type, tuple)) else matches
    ADAPTERS.add(name, Adapter(name, test, plan), replace=replace)


def register_built_in(
    name: str,
    *,
    matches: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool],
    plan: Callable[[Any], Plan | None],
) -> None:
    """`register_adapter` for the adapters of this package."""
    test = _is_instance(matches) if isinstance(matches, (type, tuple)) else matches
    ADAPTERS.add(name, Adapter(name, test, plan, built_in=True))


def _is_instance(classes: Any) -> Callable[[nn.Module], bool]:
    return lambda model: isinstance(model, classes)


def find_plan(model: nn.Module) -> Plan | None:
    """The plan of the first adapter that knows the model; None if there is none."""
    _register_imported_libraries()
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


def _register_imported_libraries() -> None:
    """Import the adapters of libraries that are imported: a model of another library cannot exist."""
    if "torchvision" in sys.modules:
        import steadygaze.vit.adapters.torchvision
    if "transformers" in sys.modules:
        import steadygaze.vit.adapters.transformers
        import steadygaze.vit.adapters.transformers_hierarchical
    if "timm" in sys.modules:
        import steadygaze.vit.adapters.timm
        import steadygaze.vit.adapters.timm_hierarchical
    if "open_clip" in sys.modules:
        import steadygaze.vit.adapters.open_clip
    if "steadygaze.models" in sys.modules:
        import steadygaze.vit.adapters.steadygaze_models  # noqa: F401
