"""The page to click in: `steadygaze app`, or in Python

    from steadygaze.app import page
    page(sg.load_model("deit_tiny_patch16_224")).launch()

`viewer` answers its questions and knows nothing of gradio; `layout` lays it out. Needs `pip install "steadygaze[app]"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput
from steadygaze.loading.load import Loaded

__all__ = ["page"]


def page(loaded: Loaded, gates: str | Path | None = None) -> Any:
    """A gradio page for this model; `.launch()` serves it. gates: a file of `steadygaze diffmask train`."""
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise BadInput('the page needs gradio: pip install "steadygaze[app]"') from error
    from steadygaze.app.layout import lay_out
    from steadygaze.app.viewer import Viewer

    return lay_out(Viewer(loaded, None if gates is None else Path(gates)))
