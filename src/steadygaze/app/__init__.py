"""The interactive page: `steadygaze app`, or in Python

    from steadygaze.app import page
    page(sg.load_model("deit_tiny_patch16_224")).launch()

`viewer` computes what it shows and does not know gradio; `layout` arranges it and `events` connects the two.
`limits` bounds what visitors may request, and `server` and `middleware` serve the page within these limits.
Needs `pip install "steadygaze[app]"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from steadygaze.app.limits import DEFAULT_LIMITS, Limits
from steadygaze.errors import InputError
from steadygaze.loading.loaded import LoadedModel

__all__ = ["Limits", "page"]


def page(
    model: LoadedModel | nn.Module,
    gates: str | Path | None = None,
    *,
    shapley: str | Path | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """A gradio page for a model; `.launch()` serves it.

    model: from `load_model`, or a module that carries its preprocessing (of timm or transformers)
    gates, shapley: files of `steadygaze diffmask train` and of `steadygaze shapley train`
    limits: what the page allows, such as `Limits(max_seconds=20)`
    """
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise InputError('the page needs gradio: pip install "steadygaze[app]"') from error
    from steadygaze.app.page import build_page
    from steadygaze.app.viewer import Viewer

    files = {"diffmask": gates, "vit_shapley": shapley}
    learned = {name: Path(file) for name, file in files.items() if file is not None}
    return build_page(Viewer.of(model, learned, limits))
