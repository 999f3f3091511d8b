"""The page: one picture, three questions. Layout and clicks only; the answers are `Viewer`'s."""

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
from steadygaze.methods.search import manner
from steadygaze.target import SCORES

PREDICTED, OWN = "what the model says", "the method's own"
FIRST = (DEFAULT, "gae", "rollout", "gradcam")  # shown when the page opens, as far as the model serves them
BAR = gr.Progress()  # where a function has it as a default, gradio hands in a bar that shows on the page
CURVES = ("share", "probability", "method")
ABOUT = {
    "look": "Warm patches speak for the class. Where several methods disagree, ask the next question.",
    "true": "Patches go for real, most relevant first (left: the class should fall soon), or come (right: it should rise soon). "
    "One picture says little: `steadygaze verify` measures many, with intervals.",
    "if": "Click a patch to take it out, click again to put it back.",
}


def lay_out(viewer: Viewer) -> gr.Blocks:
    """The page that asks this viewer."""
    opening = [name for name in FIRST if name in viewer.methods]

    def told(work: Callable[..., Any]) -> Callable[..., Any]:
        """Our errors, as a message on the page."""

        @wraps(work)
        def safe(*given: Any) -> Any:
            try:
                return work(*given)
            except SteadygazeError as error:
                raise gr.Error(str(error), print_exception=False) from error

        return safe

    def maps_of(
        picture: Any, methods: list[str], target: str, score: str, bar: gr.Progress
    ) -> dict[str, Attribution]:
        with manner(
            lambda name, done, total: bar((done, total), desc=name, unit="runs")
        ):  # how far a search is
            return viewer.maps(
                picture, methods, None if target == PREDICTED else target, None if score == OWN else score
            )

    def look(
        picture: Any, methods: list[str], target: str, score: str, signed: bool, bar: gr.Progress = BAR
    ) -> Any:
        return viewer.answers(picture), viewer.overlays(
            picture, maps_of(picture, methods, target, score, bar), signed
        )

    def judge(picture: Any, methods: list[str], target: str, score: str, bar: gr.Progress = BAR) -> Any:
        found = viewer.truths(picture, maps_of(picture, methods, target, score, bar))
        lines = [pd.DataFrame([(*point, truth.method) for truth in found for point in getattr(truth, kind)], columns=CURVES)
                 for kind in ("deletion", "insertion")]  # fmt: skip
        rows = [[truth.method, *(f"{truth.scores[name]:.1f}" for name in NAMES)] for truth in found]
        return *lines, rows

    def changed(picture: Any, gone: list[int]) -> Any:
        """What the third tab shows when these patches are gone."""
        return gone, viewer.shown(picture, gone), viewer.answers(picture, gone), viewer.words(picture, gone)

    def click(picture: Any, gone: list[int], event: gr.SelectData) -> Any:
        patch = viewer.patch_at(picture, *event.index)
        return changed(picture, [p for p in gone if p != patch] if patch in gone else [*gone, patch])

    def top(
        picture: Any, methods: list[str], target: str, score: str, share: float, bar: gr.Progress
    ) -> tuple[list[int], list[int]]:
        (best,) = maps_of(picture, methods[:1], target, score, bar).values()
        return viewer.split(best, share / 100)

    def without(
        picture: Any, methods: list[str], target: str, score: str, share: float, bar: gr.Progress = BAR
    ) -> Any:
        return changed(picture, top(picture, methods, target, score, share, bar)[0])

    def alone(
        picture: Any, methods: list[str], target: str, score: str, share: float, bar: gr.Progress = BAR
    ) -> Any:
        return changed(picture, top(picture, methods, target, score, share, bar)[1])

    def new(picture: Any) -> Any:
        if picture is None:
            return {}, [], [], None, {}, ""
        return viewer.answers(picture), [], *changed(picture, [])

    with gr.Blocks(title="steadygaze", analytics_enabled=False) as made:
        gr.Markdown(
            f"# steadygaze\n{viewer.loaded.name}: see what it looks at, test whether that is true, and take patches away yourself."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                picture = gr.Image(type="pil", label="picture", sources=["upload", "clipboard"], height=280)
                answers = gr.Label(num_top_classes=5, label="the model says")
                methods = gr.Dropdown(viewer.methods, value=opening, multiselect=True, allow_custom_value=True, label="methods",
                                      info="or type one: decompx+skipplus, attixg+plus:pairing=next")  # fmt: skip
                target = gr.Dropdown(
                    [PREDICTED, *viewer.classes], value=PREDICTED, label="class that is explained"
                )
                score = gr.Dropdown([OWN, *SCORES], value=OWN, label="quantity of it")
                signed = gr.Checkbox(label="show what speaks against it, too")
                gr.Examples([str(one) for one in _examples()], picture, label="examples")
            with gr.Column(scale=5), gr.Tabs():
                with gr.Tab("What does it look at?"):
                    gr.Markdown(ABOUT["look"])
                    explain = gr.Button("Explain", variant="primary")
                    gallery = gr.Gallery(
                        label="maps", columns=2, object_fit="contain", height=880
                    )  # two rows; more scroll
                with gr.Tab("Is that true?"):
                    gr.Markdown(ABOUT["true"])
                    verify = gr.Button("Take patches out", variant="primary")
                    with gr.Row():
                        plots = [gr.LinePlot(x="share", y="probability", color="method", title=title, y_lim=[0, 1], height=300)
                                 for title in ("most relevant out", "most relevant alone")]  # fmt: skip
                    table = gr.Dataframe(headers=["method", *(name.replace("_", " ") for name in NAMES)], interactive=False,
                                         label=f"percent, higher is better; {RANDOM} is chance")  # fmt: skip
                with gr.Tab("What if?"):
                    gr.Markdown(ABOUT["if"])
                    with gr.Row():
                        board = gr.Image(type="pil", label="patches", interactive=False)
                        with gr.Column():
                            words = gr.Markdown()
                            now = gr.Label(num_top_classes=5, label="the model says now")
                            share = gr.Slider(
                                0,
                                100,
                                20,
                                step=1,
                                label="share of the patches, %",
                                info="by the first method on the left",
                            )
                            out = gr.Button("Take the most relevant out")
                            rest = gr.Button("Leave only the most relevant")
                            back = gr.Button("Put all back")
        gone = gr.State([])
        asked, board_parts = [picture, methods, target, score], [gone, board, now, words]
        queue = {"concurrency_id": "model", "concurrency_limit": 1}  # one model: one question at a time
        picture.change(told(new), picture, [answers, gallery, *board_parts], api_name="new", **queue)
        gr.on(
            [explain.click, signed.change],
            told(look),
            [*asked, signed],
            [answers, gallery],
            api_name="look",
            **queue,
        )
        verify.click(told(judge), asked, [*plots, table], api_name="judge", **queue)
        board.select(told(click), [picture, gone], board_parts, **queue)
        out.click(told(without), [*asked, share], board_parts, api_name="without", **queue)
        rest.click(told(alone), [*asked, share], board_parts, api_name="alone", **queue)
        back.click(told(lambda one: changed(one, [])), picture, board_parts, api_name="whole", **queue)
    return made


def _examples() -> list[Path]:
    folder = files("steadygaze") / "assets" / "demo"
    return sorted(Path(str(one)) for one in folder.iterdir() if one.name.endswith(".png"))
