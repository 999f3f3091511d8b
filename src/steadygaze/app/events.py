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

from steadygaze.app.board import NOTHING, panes, removed_patches
from steadygaze.app.limits import Calls, CallStopped
from steadygaze.app.markup import text
from steadygaze.app.viewer import Viewer
from steadygaze.errors import BadInput, SteadygazeError
from steadygaze.heatmap import Attribution
from steadygaze.progress import Progress

PREDICTED, MOST_PROBABLE, DEFAULT_SCORE = "predicted class", "most probable label", "default of the method"
CURVE_COLUMNS = ("share", "probability", "method")
MESSAGE_SECONDS = 30  # how long a message is shown, unless it is closed
BAR = gr.Progress()  # gradio passes a progress bar to functions that have it as a default


class Events:
    """What happens on the page, as functions of its inputs. image: a file; removed: patches left out."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    def load(self, image: Path | None) -> Any:
        if image is None:
            return cleared()
        _, maps, board, *_, deletion, insertion, table = cleared()
        predictions = self.viewer.prediction_label(image)
        board = gr.HTML([], panes=panes(self.viewer.vit.grid, self.viewer.shown(image)))
        return predictions, maps, board, *self.what_if(image, []), deletion, insertion, table

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

    def what_if(self, image: Any, removed: Any) -> Any:
        """The prediction without these patches, and a sentence about it."""
        rows, columns = self.viewer.vit.grid
        without = removed_patches(removed, rows * columns)
        return self.viewer.prediction_label(image, without), text(self.viewer.summary(image, without))

    def show_map(
        self, image: Any, methods: Any, target: str, score: str, signed: bool, bar: gr.Progress = BAR
    ) -> Any:
        """The map beside the patches."""
        if image is None:
            return gr.skip()
        return gr.HTML(panes=self._panes(image, self._first_map(image, methods, target, score, bar), signed))

    def remove_top(
        self,
        image: Any,
        methods: Any,
        target: str,
        score: str,
        share: Any,
        signed: bool,
        bar: gr.Progress = BAR,
    ) -> Any:
        first = self._first_map(image, methods, target, score, bar)
        return self._without(image, first, signed, self._split(first, share)[0])

    def keep_top(
        self,
        image: Any,
        methods: Any,
        target: str,
        score: str,
        share: Any,
        signed: bool,
        bar: gr.Progress = BAR,
    ) -> Any:
        first = self._first_map(image, methods, target, score, bar)
        return self._without(image, first, signed, self._split(first, share)[1])

    def restore_all(self, image: Any) -> Any:
        return gr.HTML([]), *self.what_if(image, [])

    def _without(self, image: Any, first: dict[str, Attribution], signed: bool, removed: list[int]) -> Any:
        board = gr.HTML(removed, panes=self._panes(image, first, signed))
        return board, *self.what_if(image, removed)

    def _panes(self, image: Any, first: dict[str, Attribution], signed: bool) -> dict[str, Any]:
        ((overlay, caption),) = self.viewer.overlays(image, first, bool(signed), mode="nearest")
        return panes(self.viewer.vit.grid, self.viewer.shown(image), overlay, caption)

    def _split(self, first: dict[str, Attribution], share: Any) -> tuple[list[int], list[int]]:
        if not isinstance(share, (int, float)) or not 0 <= share <= 100:
            raise BadInput(f"share of the patches: expected a number in 0..100, got {share!r}")
        (attribution,) = first.values()
        return self.viewer.split(attribution, share / 100)

    def _first_map(
        self, image: Any, methods: Any, target: str, score: str, bar: gr.Progress
    ) -> dict[str, Attribution]:
        """The map of the first method that has one, by its name."""
        names = method_names(methods)
        for name in names[:-1]:
            try:
                return self._maps(image, [name], target, score, bar)
            except CallStopped:
                raise
            except SteadygazeError as problem:
                warn(problem)
        return self._maps(image, names[-1:], target, score, bar)

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
            on_problem=warn,
        )


def warn(problem: SteadygazeError) -> None:
    """Show what is wrong with one of several methods."""
    gr.Warning(text(str(problem)), MESSAGE_SECONDS)


def cleared() -> Any:
    """A page without an image: predictions, maps, the three parts of "What if?", curves, table."""
    return {}, [], gr.HTML([], panes=NOTHING), {}, "", None, None, []


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
            raise gr.Error(text(message), MESSAGE_SECONDS, print_exception=False) from error

    return answer
