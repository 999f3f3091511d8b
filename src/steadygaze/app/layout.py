"""The page: one image, three tabs. Layout and events only; `Viewer` computes the results.

Images are handed over as files, not as decoded images, so that `read_image` reads them as everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from steadygaze.app.viewer import RANDOM, Viewer
from steadygaze.errors import SteadygazeError
from steadygaze.faithfulness.removal import NAMES
from steadygaze.heatmap import Attribution
from steadygaze.method_registry import DEFAULT
from steadygaze.progress import Progress
from steadygaze.target import SCORES

PREDICTED, DEFAULT_SCORE = "predicted class", "default of the method"
FIRST_METHODS = (DEFAULT, "gae", "rollout", "gradcam")  # selected at the start, if the model supports them
BAR = gr.Progress()  # gradio passes a progress bar to functions that have it as a default
CURVE_COLUMNS = ("share", "probability", "method")
TEXTS = {
    "explain": "Warm patches are evidence for the class. If methods disagree, verify them in the next tab.",
    "verify": "Patches are removed, most relevant first (left: the probability should fall early), or "
    "inserted (right: it should rise early). One image is not a measurement: `steadygaze verify` evaluates "
    "many, with confidence intervals.",
    "remove": "Click a patch to remove it; click it again to restore it.",
}


def build_page(viewer: Viewer) -> gr.Blocks:
    """The page of this viewer."""
    events = Events(viewer)
    with gr.Blocks(title="steadygaze", analytics_enabled=False) as blocks:
        gr.Markdown(
            f"# steadygaze\n{viewer.loaded.name}: see which patches a prediction depends on, verify the "
            "explanation, and remove patches yourself."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                image = gr.Image(
                    type="filepath",
                    image_mode=None,  # the file as it is
                    label="Image",
                    sources=["upload", "clipboard"],
                    height=280,
                )
                predictions = gr.Label(num_top_classes=5, label="Prediction")
                methods = gr.Dropdown(
                    viewer.methods,
                    value=[name for name in FIRST_METHODS if name in viewer.methods],
                    multiselect=True,
                    allow_custom_value=True,
                    label="Methods",
                    info="Or type one: decompx+skipplus, attixg+plus:pairing=next",
                )
                target = gr.Dropdown([PREDICTED, *viewer.classes], value=PREDICTED, label="Class to explain")
                score = gr.Dropdown([DEFAULT_SCORE, *SCORES], value=DEFAULT_SCORE, label="Score")
                signed = gr.Checkbox(label="Also show evidence against the class")
                gr.Examples([str(path) for path in _examples()], image, label="Examples")
            with gr.Column(scale=5), gr.Tabs():
                with gr.Tab("Explain"):
                    gr.Markdown(TEXTS["explain"])
                    explain = gr.Button("Explain", variant="primary")
                    # two rows are visible, more scroll
                    gallery = gr.Gallery(
                        label="Attribution maps", columns=2, object_fit="contain", height=880
                    )
                with gr.Tab("Verify"):
                    gr.Markdown(TEXTS["verify"])
                    verify = gr.Button("Verify", variant="primary")
                    with gr.Row():
                        plots = [_curve_plot("Deletion"), _curve_plot("Insertion")]
                    table = gr.Dataframe(
                        headers=["method", *(name.replace("_", " ") for name in NAMES)],
                        interactive=False,
                        label=f"Percent, higher is better; {RANDOM} is the chance level",
                    )
                with gr.Tab("Remove patches"):
                    gr.Markdown(TEXTS["remove"])
                    with gr.Row():
                        board = gr.Image(type="pil", label="Patches", interactive=False)
                        with gr.Column():
                            summary = gr.Markdown()
                            changed = gr.Label(num_top_classes=5, label="Prediction without these patches")
                            share = gr.Slider(
                                0,
                                100,
                                20,
                                step=1,
                                label="Share of the patches, %",
                                info="Ranked by the first method on the left",
                            )
                            remove_top = gr.Button("Remove the most relevant patches")
                            keep_top = gr.Button("Keep only the most relevant patches")
                            restore_all = gr.Button("Restore all patches")
        removed = gr.State([])
        request, board_parts = [image, methods, target, score], [removed, board, changed, summary]
        queue = {"concurrency_id": "model", "concurrency_limit": 1}  # one model: one request at a time
        outputs = [predictions, gallery, *board_parts]
        image.change(reported(events.load), image, outputs, api_name="load", **queue)
        gr.on(
            [explain.click, signed.change],
            reported(events.explain),
            [*request, signed],
            [predictions, gallery],
            api_name="explain",
            **queue,
        )
        verify.click(reported(events.verify), request, [*plots, table], api_name="verify", **queue)
        board.select(reported(events.click), [image, removed], board_parts, **queue)
        for button, handler in ((remove_top, events.remove_top), (keep_top, events.keep_top)):
            button.click(
                reported(handler), [*request, share], board_parts, api_name=handler.__name__, **queue
            )
        restore_all.click(reported(events.restore_all), image, board_parts, api_name="restore_all", **queue)
    return blocks


class Events:
    """What happens on the page, as functions of its inputs. image: a file; removed: patches left out."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    def load(self, image: Any) -> Any:
        if image is None:
            return {}, [], [], None, {}, ""
        return self.viewer.predictions(image), [], *self._board(image, [])

    def explain(
        self, image: Any, methods: list[str], target: str, score: str, signed: bool, bar: gr.Progress = BAR
    ) -> Any:
        maps = self._maps(image, methods, target, score, bar)
        return self.viewer.predictions(image), self.viewer.overlays(image, maps, signed)

    def verify(self, image: Any, methods: list[str], target: str, score: str, bar: gr.Progress = BAR) -> Any:
        curves = self.viewer.removal_curves(image, self._maps(image, methods, target, score, bar))
        deletion = [(*point, curve.method) for curve in curves for point in curve.deletion]
        insertion = [(*point, curve.method) for curve in curves for point in curve.insertion]
        rows = [[curve.method, *(f"{curve.scores[name]:.1f}" for name in NAMES)] for curve in curves]
        frames = (pd.DataFrame(points, columns=CURVE_COLUMNS) for points in (deletion, insertion))
        return *frames, rows

    def click(self, image: Any, removed: list[int], event: gr.SelectData) -> Any:
        patch = self.viewer.patch_at(image, *event.index)
        if patch in removed:
            return self._board(image, [other for other in removed if other != patch])
        return self._board(image, [*removed, patch])

    def remove_top(
        self, image: Any, methods: list[str], target: str, score: str, share: float, bar: gr.Progress = BAR
    ) -> Any:
        top, _ = self._split(image, methods, target, score, share, bar)
        return self._board(image, top)

    def keep_top(
        self, image: Any, methods: list[str], target: str, score: str, share: float, bar: gr.Progress = BAR
    ) -> Any:
        _, rest = self._split(image, methods, target, score, share, bar)
        return self._board(image, rest)

    def restore_all(self, image: Any) -> Any:
        return self._board(image, [])

    def _board(self, image: Any, removed: list[int]) -> Any:
        """What the third tab shows without these patches."""
        viewer = self.viewer
        shown, predictions = viewer.shown(image, removed), viewer.predictions(image, removed)
        return removed, shown, predictions, viewer.summary(image, removed)

    def _split(
        self, image: Any, methods: list[str], target: str, score: str, share: float, bar: gr.Progress
    ) -> tuple[list[int], list[int]]:
        (attribution,) = self._maps(image, methods[:1], target, score, bar).values()
        return self.viewer.split(attribution, share / 100)

    def _maps(
        self, image: Any, methods: list[str], target: str, score: str, bar: gr.Progress
    ) -> dict[str, Attribution]:
        chosen_target = None if target == PREDICTED else target
        chosen_score = None if score == DEFAULT_SCORE else score

        def show(progress: Progress) -> None:
            bar((progress.done, progress.total), desc=progress.task, unit="runs")

        return self.viewer.maps(image, methods, chosen_target, chosen_score, on_progress=show)


def reported(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Show our errors as a message on the page."""

    @wraps(handler)
    def wrapper(*inputs: Any) -> Any:
        try:
            return handler(*inputs)
        except SteadygazeError as error:
            raise gr.Error(str(error), print_exception=False) from error

    return wrapper


def _curve_plot(title: str) -> gr.LinePlot:
    x, y, color = CURVE_COLUMNS
    return gr.LinePlot(x=x, y=y, color=color, title=title, y_lim=[0, 1], height=300)


def _examples() -> list[Path]:
    folder = files("steadygaze") / "assets" / "demo"
    return sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".png"))
