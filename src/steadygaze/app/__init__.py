"""The interactive page: `steadygaze app`, or in Python

    from steadygaze.app import page
    page(sg.load_model("deit_tiny_patch16_224")).launch()

`viewer` computes what the page shows, without gradio; `layout` arranges it, and `guard` serves it within
`limits`; `board` is the image on which patches are removed.
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
    calibration: str | Path | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Make a gradio page for a model; `.launch()` serves it.

    Args:
        model (LoadedModel | nn.Module): from `load_model`, or a module of timm or transformers with its
            preprocessing. The page of a backbone without a classifier shows attention and features; with a
            question, `sg.ask(model, feature=...)`, it explains too.
        gates (str | Path): file of `steadygaze diffmask train`.
        shapley (str | Path): file of `steadygaze shapley train`.
        calibration (str | Path): file of `steadygaze calibrate`.
        limits (Limits): what the page allows, such as `Limits(max_seconds=20)`.

    Returns:
        gradio.Blocks: the page.
    """
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise InputError('the page needs gradio: pip install "steadygaze[app]"') from error
    from steadygaze.app.layout import build_page
    from steadygaze.app.viewer import Viewer

    files = {"calibrated": calibration, "diffmask": gates, "vit_shapley": shapley}
    learned = {name: Path(file) for name, file in files.items() if file is not None}
    return build_page(Viewer.of(model, learned, limits))
