"""The page: one image, three tabs. `Events` computes what it shows."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr

from steadygaze.app.board import patch_board
from steadygaze.app.events import (
    CURVE_COLUMNS,
    DEFAULT_SCORE,
    PREDICTED,
    Events,
    answered,
    cleared,
    predicted,
)
from steadygaze.app.limits import Calls
from steadygaze.app.markup import heading, legend
from steadygaze.app.points import FIRST_POINT, clicked, marked, needs_point, with_point
from steadygaze.app.prompts import FIRST_PROMPTS, needs_prompts, prompt_lines, with_box, with_prompts
from steadygaze.app.server import CLEAN_EVERY, KEEP_FILES, guard
from steadygaze.app.viewer import RANDOM, Viewer
from steadygaze.errors import BadInput
from steadygaze.method_registry import DEFAULT
from steadygaze.target import NOUNS, SCORES_OF

FIRST_METHODS = (DEFAULT, "gae", "rollout", "gradcam")  # selected at the start, if the model supports them
TEXTS = {
    "explain": "Warm patches are evidence for the {noun}. If methods disagree, verify them.",
    "verify": "Patches are removed, most relevant first (deletion: the {quantity} should fall early), or "
    "inserted (insertion: it should rise early). One image is not a measurement: `steadygaze verify` "
    "evaluates many, with confidence intervals.",
    "remove": "Click a patch, or drag over several, to remove them; click again to restore them.",
}


def build_page(viewer: Viewer) -> gr.Blocks:
    """The page of this viewer."""
    calls, asks, points = Calls(viewer.limits), needs_prompts(viewer), needs_point(viewer)
    model = viewer
    if asks or points:
        viewer = with_prompts(model, FIRST_PROMPTS) if asks else with_point(model, FIRST_POINT)
    events = Events(viewer)
    noun, values = NOUNS[viewer.outputs], viewer.outputs == "values"
    unit = "" if values else "Percent, "
    texts = {"noun": noun, "quantity": "value" if values else "probability"}
    targets = viewer.classes if values else [predicted(viewer), *viewer.classes]
    with gr.Blocks(
        title="steadygaze", analytics_enabled=False, delete_cache=(CLEAN_EVERY, KEEP_FILES)
    ) as blocks:
        gr.HTML(heading(viewer.loaded.name), elem_classes="sg-plain")
        with gr.Row(elem_id="sg-main"):
            with gr.Column(elem_id="sg-image"):
                image = gr.Image(
                    type="filepath",
                    image_mode=None,  # the file as it is
                    label="Image",
                    sources=["upload", "clipboard"],
                    height=220,
                    elem_id="sg-upload",
                )
                gr.Examples([str(path) for path in _examples()], image, label="Examples")
                prompts = gr.Textbox(
                    FIRST_PROMPTS, lines=3, label="Prompts", info="One class in each line", visible=asks
                )
                seen = gr.Image(
                    type="pil",
                    label="Click a pixel to ask about it",
                    format="png",
                    interactive=False,
                    visible=points,
                )
                pixel = gr.Textbox(FIRST_POINT, label="Pixel x, y", info="Of the image above", visible=points)
                predictions = gr.Label(num_top_classes=5, label="Prediction", elem_id="sg-prediction")
            with gr.Column(elem_id="sg-questions"), gr.Tabs():
                with gr.Tab("Why?"):
                    gr.Markdown(TEXTS["explain"].format(**texts))
                    explain = gr.Button("Explain", variant="primary")
                    legends = [gr.HTML(legend(False, noun), elem_classes="sg-plain")]
                    gallery = gr.Gallery(
                        label="Attribution maps",
                        columns=2,
                        object_fit="contain",
                        format="png",  # sharp: the default is lossy
                        height="auto",
                        elem_id="sg-maps",
                    )
                with gr.Tab("Is it true?"):
                    gr.Markdown(TEXTS["verify"].format(**texts))
                    verify = gr.Button("Verify", variant="primary")
                    with gr.Row():
                        plots = [
                            _curve_plot("Deletion", "removed", values),
                            _curve_plot("Insertion", "inserted", values),
                        ]
                    table = gr.Dataframe(
                        headers=["method", *(name.replace("_", " ") for name in viewer.metrics)],
                        interactive=False,
                        label=f"{unit}higher is better; {RANDOM} is the chance level",
                    )
                with gr.Tab("What if?") as what_if:
                    gr.Markdown(TEXTS["remove"])
                    summary = gr.HTML(elem_id="sg-summary", elem_classes="sg-plain")
                    board = patch_board()
                    legends.append(gr.HTML(legend(False, noun), elem_classes="sg-plain"))
                    with gr.Row():
                        changed = gr.Label(num_top_classes=5, label="Prediction without these patches")
                        with gr.Column():
                            share = gr.Slider(
                                0,
                                100,
                                20,
                                step=1,
                                label="Share of the patches, %",
                                info="Ranked by the first method in the settings",
                            )
                            remove_top = gr.Button("Remove the most relevant patches")
                            keep_top = gr.Button("Keep only the most relevant patches")
                            restore_all = gr.Button("Restore all patches")
            with gr.Column(elem_id="sg-settings"), gr.Accordion("Settings"):
                methods = gr.Dropdown(
                    viewer.methods,
                    value=[name for name in FIRST_METHODS if name in viewer.methods],
                    multiselect=True,
                    allow_custom_value=True,
                    label="Methods",
                    info="Or type one: decompx+skipplus, attixg+plus:pairing=next",
                )
                target = gr.Dropdown(
                    targets,
                    value=targets[0],
                    label=f"{noun.capitalize()} to explain",
                    allow_custom_value=asks,  # the prompts change
                )
                scores = [DEFAULT_SCORE, *SCORES_OF[viewer.outputs]]
                score = gr.Dropdown(scores, value=DEFAULT_SCORE, label="Score")
                signed = gr.Checkbox(label=f"Also show evidence against the {noun}")
        request, board_parts = [image, methods, target, score], [board, changed, summary]
        everything = [predictions, gallery, *board_parts, *plots, table]
        # `Calls` has the queue; "always_last": what is clicked while a call runs is answered after it
        settings: dict[str, Any] = {
            "preprocess": False,
            "concurrency_limit": None,
            "trigger_mode": "always_last",
        }

        def on(trigger: Any, handler: Any, inputs: Any, outputs: Any, **names: Any) -> Any:
            if asks or points:
                change, box = (with_prompts, prompts) if asks else (with_point, pixel)
                handler, inputs = with_box(model, handler.__name__, change), [inputs[0], box, *inputs[1:]]
            return gr.on(trigger, answered(calls, handler), inputs, outputs, **names, **settings)

        if asks:
            prompts.change(_targets, prompts, target, api_name=False)
        if points:
            _listen_for_points(model, calls, image, pixel, seen, settings)
        loads = [image.change, pixel.change] if points else image.change
        loading = on(loads, events.load, [image], everything, api_name="load")
        loading.failure(cleared, None, everything, api_name=False)
        on(
            [explain.click, signed.change],
            events.explain,
            [*request, signed],
            [predictions, gallery],
            api_name="explain",
        )
        on(verify.click, events.verify, request, [*plots, table], api_name="verify")
        on(
            board.input,
            events.what_if,
            [image, board],
            [changed, summary],
            api_name="what_if",
            show_progress="minimal",
        )
        on(
            [what_if.select, signed.change],
            events.show_map,
            [*request, signed],
            board,
            api_name="show_map",
            show_progress="hidden",  # a progress bar would cover the board
        )
        ranked = [*request, share, signed]
        on(remove_top.click, events.remove_top, ranked, board_parts, api_name="remove_top")
        on(keep_top.click, events.keep_top, ranked, board_parts, api_name="keep_top")
        on(restore_all.click, events.restore_all, [image], board_parts, api_name="restore_all")
        signed.change(
            lambda shown: [legend(bool(shown), noun)] * len(legends), signed, legends, api_name=False
        )
    guard(blocks, calls)
    return blocks


def _listen_for_points(
    model: Viewer, calls: Calls, image: Any, pixel: Any, seen: Any, settings: dict[str, Any]
) -> None:
    """Mark the pixel on the image that the model sees, and let a click there choose another."""

    def mark(file: Any, text: Any) -> Any:
        return marked(model, file, text)

    def choose(file: Any, event: gr.SelectData) -> str:
        return clicked(model, file, event.index)

    gr.on(
        [image.change, pixel.change], answered(calls, mark), [image, pixel], seen, api_name=False, **settings
    )
    gr.on(seen.select, answered(calls, choose), [image], pixel, api_name=False, **settings)


def _targets(prompts: str) -> Any:
    """The list of targets for other prompts."""
    try:
        return gr.Dropdown([PREDICTED, *prompt_lines(prompts)], value=PREDICTED)
    except BadInput:  # still being typed
        return gr.Dropdown([PREDICTED], value=PREDICTED)


def _curve_plot(title: str, action: str, values: bool) -> gr.LinePlot:
    x, y, color = CURVE_COLUMNS
    return gr.LinePlot(
        x=x,
        x_title=f"share of the patches {action}",
        y=y,
        y_title="value" if values else y,
        color=color,
        title=title,
        y_lim=None if values else [0, 1],
        height=300,
    )


def _examples() -> list[Path]:
    folder = files("steadygaze") / "assets" / "demo"
    return sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".png"))
