"""The interactive page: `steadygaze app`, or in Python

    from steadygaze.app import page
    page(sg.load_model("deit_tiny_patch16_224")).launch()

`viewer` computes what it shows and does not know gradio; `layout` arranges it.
Needs `pip install "steadygaze[app]"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from steadygaze.errors import BadInput
from steadygaze.loading.loaded import LoadedModel

__all__ = ["page"]


def page(model: LoadedModel | nn.Module, gates: str | Path | None = None) -> Any:
    """A gradio page for a model; `.launch()` serves it.

    model: from `load_model`, or a module that carries its preprocessing (of timm or transformers)
    gates: a file of `steadygaze diffmask train`
    """
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise BadInput('the page needs gradio: pip install "steadygaze[app]"') from error
    from steadygaze.app.layout import build_page
    from steadygaze.app.viewer import Viewer

    return build_page(Viewer.of(model, None if gates is None else Path(gates)))
