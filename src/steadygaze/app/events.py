"""What happens when something on the page is clicked: from the values of its components to those it shows.

Components hand over their values as the browser sent them (`preprocess=False`): gradio would open and convert
an uploaded image, and fail without a message on a file that is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
from gradio.context import LocalContext

from steadygaze.app.limits import Calls
from steadygaze.app.viewer import Viewer
from steadygaze.errors import BadInput, SteadygazeError
from steadygaze.heatmap import Attribution
from steadygaze.progress import Progress

PREDICTED, MOST_PROBABLE, DEFAULT_SCORE = "predicted class", "most probable label", "default of the method"
CURVE_COLUMNS = ("share", "probability", "method")
BAR = gr.Progress()  # gradio passes a progress bar to functions that have it as a default


class Events:
    """What happens on the page, as functions of its inputs. image: a file; removed: patches left out."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    def load(self, image: Path | None) -> Any:
        if image is None:
            return {}, [], [], None, {}, ""
        return self.viewer.prediction_label(image), [], *self._board(image, [])

    def explain(
        self, image: Any, methods: Any, target: str, score: str, signed: bool, bar: gr.Progress = BAR
    ) -> Any:
        maps = self._maps(image, methods, target, score, bar)
        return self.viewer.prediction_label(image), self.viewer.overlays(image, maps, bool(signed))

    def verify(self, image: Any, methods: Any, target: str, score: str, bar: gr.Progress = BAR) -> Any:
        curves = self.viewer.removal_curves(image, self._maps(image, methods, target, score, bar))
        deletion = [(*point, curve.method) for curve in curves for point in curve.deletion]
        insertion = [(*point, curve.method) for curve in curves for point in curve.insertion]
        viewer, form = self.viewer, ".4g" if self.viewer.outputs == "values" else ".1f"
        rows = [[one.method, *(f"{one.scores[name]:{form}}" for name in viewer.metrics)] for one in curves]
        frames = (pd.DataFrame(points, columns=CURVE_COLUMNS) for points in (deletion, insertion))
        return *frames, rows

    def click(self, image: Any, removed: list[int], event: gr.SelectData) -> Any:
        patch = self.viewer.patch_at(image, *event.index)
        if patch in removed:
            return self._board(image, [other for other in removed if other != patch])
        return self._board(image, [*removed, patch])

    def remove_top(
        self, image: Any, methods: Any, target: str, score: str, share: Any, bar: gr.Progress = BAR
    ) -> Any:
        top, _ = self._split(image, methods, target, score, share, bar)
        return self._board(image, top)

    def keep_top(
        self, image: Any, methods: Any, target: str, score: str, share: Any, bar: gr.Progress = BAR
    ) -> Any:
        _, rest = self._split(image, methods, target, score, share, bar)
        return self._board(image, rest)

    def restore_all(self, image: Any) -> Any:
        return self._board(image, [])

    def _board(self, image: Any, removed: list[int]) -> Any:
        """What the third tab shows without these patches."""
        viewer = self.viewer
        shown, predictions = viewer.shown(image, removed), viewer.prediction_label(image, removed)
        return removed, shown, predictions, viewer.summary(image, removed)

    def _split(
        self, image: Any, methods: Any, target: str, score: str, share: Any, bar: gr.Progress
    ) -> tuple[list[int], list[int]]:
        if not isinstance(share, (int, float)) or not 0 <= share <= 100:
            raise BadInput(f"share of the patches: expected a number in 0..100, got {share!r}")
        (attribution,) = self._maps(image, method_names(methods)[:1], target, score, bar).values()
        return self.viewer.split(attribution, share / 100)

    def _maps(
        self, image: Any, methods: Any, target: str, score: str, bar: gr.Progress
    ) -> dict[str, Attribution]:
        chosen_target = None if target == predicted(self.viewer) else str(target)
        chosen_score = None if score == DEFAULT_SCORE else str(score)

        def show(progress: Progress) -> None:
            bar((progress.done, progress.total), desc=progress.task, unit="runs")

        return self.viewer.maps(
            image,
            method_names(methods),
            chosen_target,
            chosen_score,
            on_progress=show,
            on_problem=lambda problem: gr.Warning(str(problem)),
        )


def predicted(viewer: Viewer) -> str:
    """The entry of the list of targets that stands for the predicted one."""
    return MOST_PROBABLE if viewer.outputs == "labels" else PREDICTED


def method_names(value: Any) -> list[str]:
    """The names in a value of the page's list of methods."""
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput(f"methods: expected a list of names, got {value!r}")
    return names


def uploaded_file(value: Any) -> Path | None:
    """The file in a value of the page's image; None if there is no image."""
    if value is None:
        return None
    path = value.get("path") if isinstance(value, dict) else None
    if not isinstance(path, str):
        raise BadInput("expected an uploaded image file, got none: upload one or choose an example")
    return Path(path)


def answered(calls: Calls, handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, run within the page's limits; its first input is the image, and our errors are messages."""

    @wraps(handler)
    async def answer(value: Any, *inputs: Any) -> Any:
        request = LocalContext.request.get(None)
        client = request.client.host if request is not None and request.client is not None else ""
        session = None if request is None else request.session_hash
        image: Path | None = None
        try:
            image = uploaded_file(value)
            return await calls.run(partial(handler, image, *inputs), client, session)
        except SteadygazeError as error:
            message = str(error)
            if image is not None:  # visitors need not know where their file is stored
                message = message.replace(str(image), image.name)
            raise gr.Error(message, print_exception=False) from error

    return answer
