"""The models that `load_model` knows by name, as `steadygaze models` lists them."""

from __future__ import annotations

from dataclasses import dataclass

import steadygaze.models as own_models
from steadygaze.loading.embedded import EMBEDDED
from steadygaze.loading.torchvision_models import PREFIX, vit_names
from steadygaze.registry import matches

# modules of timm whose models the adapters support
TIMM_PLAIN = (
    "vision_transformer",
    "deit",
    "eva",
    "beit",
    "cait",
    "vision_transformer_relpos",
    "vision_transformer_hybrid",
    "naflexvit",
)
TIMM_STAGED = (
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
    "pvt_v2",
    "pit",
    "mvitv2",
    "hiera",
    "twins",
    "levit",
    "xcit",
)


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be loaded by name.

    view: "plain" (one patch grid for all blocks) or "staged" (the grid shrinks between stages)
    """

    name: str
    library: str
    view: str


def list_models(pattern: str = "") -> list[str]:
    """Names for `load_model`: vision transformers of timm, torchvision and this package.

    pattern: part of the name, where a hyphen stands for an underscore; or with *, ? and [] a pattern for the
        whole name

    >>> list_models("embed")
    ['embedded']
    """
    return [info.name for info in model_infos(pattern)]


def model_infos(pattern: str = "") -> list[ModelInfo]:
    """The same with library and view."""
    return [info for info in _all_models() if matches(info.name, pattern)]


def _all_models() -> list[ModelInfo]:
    infos = [ModelInfo(EMBEDDED, "steadygaze", "plain")]
    for library, plain, staged in (
        ("steadygaze", own_models.PLAIN, own_models.STAGED),
        ("timm", TIMM_PLAIN, TIMM_STAGED),
    ):
        infos += [ModelInfo(name, library, "plain") for name in _timm_names(plain, library)]
        infos += [ModelInfo(name, library, "staged") for name in _timm_names(staged, library)]
    for name in vit_names():
        infos.append(ModelInfo(PREFIX + name, "torchvision", "staged" if "swin" in name else "plain"))
    return infos


def _timm_names(modules: tuple[str, ...], library: str) -> list[str]:
    """The names that these modules register with timm."""
    import timm

    names = [name for module in modules for name in timm.list_models(module=module)]
    return sorted(set(names)) if library == "timm" else names
