"""The page: one image, four tabs. `Events` computes what a click shows, and `build_page` arranges it.

Names come from model files, uploads and visitors, and gradio shows messages as HTML: every name is escaped
here. Components hand over their values as the browser sent them (`preprocess=False`), because gradio would
open and convert an uploaded file, and fail without a message on one that is not an image.

The page of a segmenter has a pixel to ask about, and that of a model which compares images with text (CLIP,
SigLIP, open_clip) has a box of prompts: each event gets the value, and a classifier made from it answers.
Attention and features depend on neither. The page of a backbone without a classifier has only the tab "Look".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from html import escape
from importlib.resources import files
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_type_hints

import gradio as gr
import pandas as pd
from gradio.context import LocalContext
from PIL import Image, ImageDraw

from steadygaze.app.board import NOTHING, panes, patch_board, removed_patches
from steadygaze.app.guard import guard, own_folder
from steadygaze.app.limits import CallStoppedError, Limits, StopWatch
from steadygaze.app.viewer import RANDOM, Look, Viewer
from steadygaze.errors import InputError, MethodUnavailableError, SteadygazeError, UnknownNameError
from steadygaze.loading.ask import ask, segments, zero_shot
from steadygaze.methods.registry import DEFAULT, parse_method
from steadygaze.progress import Progress
from steadygaze.questions.regions import Region
from steadygaze.results.attribution import Attribution
from steadygaze.results.drawing import legend_bar, legend_words
from steadygaze.target import NOUNS, SCORES_OF
from steadygaze.vit.adapt import unwrapped
from steadygaze.vit.outputs import compares_text

CSS = (files(__package__) / "page.css").read_text(encoding="utf-8")
CLEAN_EVERY, KEEP_FILES = 60, 3600  # seconds: uploads and results older than the second are deleted
LEGEND_STOPS = 33  # colors of the gradient


def text(words: str) -> str:
    """Words as HTML that shows exactly these words.

    Examples:
        >>> text("<b>cat</b>")
        '&lt;b&gt;cat&lt;/b&gt;'
    """
    return escape(words, quote=False)


PURPOSE = (
    "look at attention and features, see which patches a prediction depends on, verify the explanation, and "
    "remove patches yourself."
)
BACKBONE_PURPOSE = (
    "look at attention and features. The model has no classifier; with a question, such as the similarity to "
    "an image (--similar-to), the page explains too."
)


def heading(model: str, purpose: str = PURPOSE) -> str:
    """The title of the page and what it is for."""
    return (
        f'<div class="sg-heading"><h1>steadygaze</h1><p>{text(model)}<span class="sg-purpose">: {purpose}'
        "</span></p></div>"
    )


def legend(signed: bool, noun: str) -> str:
    """The colors of the maps and what they mean.

    Args:
        noun: What the evidence is for.
    """
    kind = "signed" if signed else "positive"
    return color_bar(kind, *legend_words(kind, noun)[0])


def color_bar(kind: str, low: str, high: str) -> str:
    """The colors of one kind of map between two words."""
    bar = legend_bar(kind, (LEGEND_STOPS, 1))
    colors = [f"rgb{bar.getpixel((x, 0))}" for x in range(LEGEND_STOPS)]
    gradient = f"background: linear-gradient(to right, {', '.join(colors)})"
    return f'<div class="sg-legend"><span>{low}</span><i style="{gradient}"></i><span>{high}</span></div>'


FIRST_POINT = ""  # the center of the image
MARK = 6  # pixels, radius of the mark


def needs_point(viewer: Viewer) -> bool:
    """Whether the viewer's model gives a class for each pixel."""
    return segments(viewer.loaded)


def parse_point(viewer: Viewer, text: Any) -> tuple[int, int]:
    """x and y in the text "x, y"; the center of the image if it is empty."""
    height, width = viewer.loaded.size
    if text is None or text == "":
        return width // 2, height // 2
    numbers = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", text) if isinstance(text, str) else None
    if numbers is None:
        raise InputError(f"pixel: expected x, y such as {width // 2}, {height // 2}, got {text!r:.40}")
    return int(numbers[1]), int(numbers[2])


def with_point(viewer: Viewer, text: Any) -> Viewer:
    """The viewer of the classifier of one pixel."""
    return _with_point(viewer, parse_point(viewer, text))


@lru_cache(maxsize=8)
def _with_point(viewer: Viewer, point: tuple[int, int]) -> Viewer:
    return replace(viewer, loaded=ask(viewer.loaded, region=Region(point=point)))


def marked(viewer: Viewer, image: Path | None, text: Any) -> Image.Image | None:
    """What the model sees, with a mark at the pixel."""
    if image is None:
        return None
    with_point(viewer, text)  # refuses a pixel outside of the image
    shown, (x, y) = viewer.shown(image).copy(), parse_point(viewer, text)
    height, width = viewer.loaded.size
    center_x, center_y = (x + 0.5) * shown.width / width, (y + 0.5) * shown.height / height
    draw = ImageDraw.Draw(shown)
    for radius, color in ((MARK + 1, "black"), (MARK, "white")):
        box = (center_x - radius, center_y - radius, center_x + radius, center_y + radius)
        draw.ellipse(box, outline=color, width=2)
    return shown


def clicked(viewer: Viewer, image: Path | None, place: tuple[float, float]) -> str:
    """The pixel under a place of an image that is shown, as text."""
    if image is None:
        return FIRST_POINT
    shown = viewer.shown(image)
    height, width = viewer.loaded.size
    x = min(int(place[0] * width / shown.width), width - 1)
    y = min(int(place[1] * height / shown.height), height - 1)
    return f"{x}, {y}"


FIRST_PROMPTS = "a photo of a cat\na photo of a dog\na photo of a bird"
MAX_PROMPTS, MAX_LETTERS = 100, 1_000


def needs_prompts(viewer: Viewer) -> bool:
    """Whether the classes of the viewer's model have to be typed in."""
    return compares_text(unwrapped(viewer.loaded))


def prompt_lines(text: Any) -> list[str]:
    """The prompts in the box, one in each line."""
    lines = [line.strip() for line in text.splitlines()] if isinstance(text, str) else []
    prompts = list(dict.fromkeys(line for line in lines if line))
    if not 2 <= len(prompts) <= MAX_PROMPTS or any(len(prompt) > MAX_LETTERS for prompt in prompts):
        raise InputError(
            f"prompts: expected 2 to {MAX_PROMPTS} different texts of at most {MAX_LETTERS} letters, one in "
            f"each line, got {len(prompts)}"
        )
    return prompts


def with_prompts(viewer: Viewer, text: Any) -> Viewer:
    """The viewer of the classifier made of the prompts in the box."""
    return _with_prompts(viewer, tuple(prompt_lines(text)))


@lru_cache(maxsize=8)
def _with_prompts(viewer: Viewer, prompts: tuple[str, ...]) -> Viewer:
    return replace(viewer, loaded=zero_shot(viewer.loaded, prompts, "none"))


def with_box(viewer: Viewer, name: str, change: Callable[[Viewer, Any], Viewer]) -> Callable[..., Any]:
    """An event of the page as a function of the image, the text in a box and its other inputs.

    Args:
        change: Gives the viewer that answers, from this one and the text.
    """
    event = getattr(Events(viewer), name)

    def handler(image: Any, text: Any, *inputs: Any) -> Any:
        return getattr(Events(change(viewer, text)), name)(image, *inputs)

    own = signature(event)
    image, *rest = own.parameters.values()
    box = Parameter("text", Parameter.POSITIONAL_OR_KEYWORD)
    handler.__name__, handler.__annotations__ = name, get_type_hints(event)
    # gradio finds by the signature where it has to pass its progress bar and the place of a click
    handler.__signature__ = own.replace(parameters=[image, box, *rest])  # type: ignore[attr-defined]
    return handler


ATTENTION, SIMILAR, COMPONENTS = LOOKS = ("Attention", "Similar patches", "Principal components")
LOOK_WORDS = {ATTENTION: legend_words("attention", "")[0], SIMILAR: ("least similar", "most similar")}


def look_legend(kind: str) -> str:
    """The colors of what the tab "Look" shows; principal components have no scale."""
    return color_bar("attention", *LOOK_WORDS[kind]) if kind in LOOK_WORDS else ""


BOTH = ("log_odds", "logit")  # the two that a page shows side by side
BOTH_SCORES = "log_odds and logit, side by side"
PREDICTED, MOST_PROBABLE, DEFAULT_SCORE = "predicted class", "most probable label", "default of the method"
CURVE_COLUMNS = ("share", "probability", "method")
MESSAGE_SECONDS = 30  # how long a message is shown, unless it is closed
BAR = gr.Progress()  # gradio passes a progress bar to functions that have it as a default


class Events:
    """What happens on the page, as functions of its inputs: the image file, patches that are left out, ..."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    def load(self, image: Path | None) -> Any:
        if image is None:
            return cleared()
        _, maps, board, *_, deletion, insertion, table, checks = cleared()
        predictions = self.viewer.prediction_label(image)
        board = gr.HTML([], panes=panes(self.viewer.vit.grid, self.viewer.shown(image)))
        return predictions, maps, board, *self.what_if(image, []), deletion, insertion, table, checks

    def look(
        self, image: Any, kind: Any, layer: Any, mean: Any, head: Any, pixel: Any, nearest_head: bool = False
    ) -> Any:
        """A layer drawn over the image, the legend and words about it, and which heads there are."""
        if image is None:
            return nothing_seen()
        at = None if pixel in (None, "") else parse_point(self.viewer, pixel)
        look = self.drawn(image, kind, layer, None if mean else head, at, nearest_head)
        heads = look.heads or 0
        several = heads > 1
        head = {} if look.head is None else {"value": look.head}
        slider = gr.update(maximum=heads - 1, **head) if several else gr.skip()
        return look.image, look_legend(kind), text(look.caption), gr.Row(visible=several), slider

    def drawn(
        self, image: Any, kind: Any, layer: Any, head: Any = None, at: Any = None, nearest_head: bool = False
    ) -> Look:
        """A layer drawn over the image; what a model cannot show is the caption."""
        viewer = self.viewer
        try:
            if kind == ATTENTION:
                return viewer.attention_overlay(image, layer, head, at, nearest_head=nearest_head)
            if kind == SIMILAR:
                return viewer.similar(image, layer, at)
            if kind == COMPONENTS:
                return viewer.pca(image, layer)
        except MethodUnavailableError as problem:
            return Look(viewer.shown(image), str(problem))
        raise UnknownNameError("view", str(kind), LOOKS)

    def look_at_layer(self, image: Any, kind: Any, layer: Any, mean: Any, head: Any, pixel: Any) -> Any:
        """As `look`, after the layer has changed: layers may differ in their number of heads."""
        return self.look(image, kind, layer, mean, head, pixel, nearest_head=True)

    def choose_patch(self, image: Any, event: gr.SelectData) -> str:
        """The pixel that was clicked."""
        return clicked(self.viewer, image, event.index)

    def explain(
        self,
        image: Any,
        methods: Any,
        target: str,
        score: str,
        signed: bool,
        check: bool,
        bar: gr.Progress = BAR,
    ) -> Any:
        maps = self._maps(image, methods, target, score, bar, check=bool(check))
        overlays = self.viewer.overlays(image, maps, bool(signed))
        return self.viewer.prediction_label(image), overlays, check_list(self.viewer.check_texts(maps))

    def verify(self, image: Any, methods: Any, target: str, score: str, bar: gr.Progress = BAR) -> Any:
        curves = self.viewer.removal_curves(image, self._maps(image, methods, target, score, bar))
        deletion = [(*point, curve.method) for curve in curves for point in curve.deletion]
        insertion = [(*point, curve.method) for curve in curves for point in curve.insertion]
        viewer, form = self.viewer, ".4g" if self.viewer.outputs == "values" else ".1f"
        rows = [
            [curve.method, *(f"{curve.scores[name]:{form}}" for name in viewer.metrics)] for curve in curves
        ]
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
            raise InputError(f"share of the patches: expected a number in 0..100, got {share!r}")
        (attribution,) = first.values()
        return self.viewer.split(attribution, share / 100)

    def _first_map(
        self, image: Any, methods: Any, target: str, score: str, bar: gr.Progress
    ) -> dict[str, Attribution]:
        """The map of the first method that has one, by its name."""
        names, score = method_names(methods), BOTH[0] if score == BOTH_SCORES else score
        for name in names[:-1]:
            try:
                return self._maps(image, [name], target, score, bar)
            except CallStoppedError:
                raise
            except SteadygazeError as problem:
                warn(problem)
        return self._maps(image, names[-1:], target, score, bar)

    def _maps(
        self,
        image: Any,
        methods: Any,
        target: str,
        score: str,
        bar: gr.Progress,
        *,
        check: bool = False,
    ) -> dict[str, Attribution]:
        if score == BOTH_SCORES:
            return self._both_scores(image, methods, target, bar, check=check)
        chosen_target = None if target == predicted(self.viewer) else str(target)
        chosen_score = None if score == DEFAULT_SCORE else str(score)

        def show(progress: Progress) -> None:
            bar((progress.done, progress.total), desc=progress.task, unit="runs")

        return self.viewer.maps(
            image,
            method_names(methods),
            chosen_target,
            chosen_score,
            check=check,
            on_progress=show,
            on_problem=warn,
        )

    def _both_scores(
        self, image: Any, methods: Any, target: str, bar: gr.Progress, *, check: bool
    ) -> dict[str, Attribution]:
        """The maps of both scores, those of a method beside one another; then methods that need no class."""
        first = self._maps(image, methods, target, BOTH[0], bar, check=check)
        names = [name for name in first if parse_method(name).class_specific]
        second = self._maps(image, names, target, BOTH[1], bar, check=check) if names else {}
        pairs: dict[str, Attribution] = {}
        for name in names:
            pairs |= {
                f"{name}, {score}": maps[name] for score, maps in zip(BOTH, (first, second), strict=True)
            }
        return pairs | {name: first[name] for name in first if name not in names}


def check_list(sentences: Mapping[str, str]) -> str:
    """What removal showed of each map, as a list; "" without a check."""
    lines = "".join(f"<li><b>{text(name)}</b>: {text(words)}</li>" for name, words in sentences.items())
    return f'<ul class="sg-checks">{lines}</ul>' if lines else ""


def warn(problem: SteadygazeError) -> None:
    """Show what is wrong with one of several methods."""
    gr.Warning(text(str(problem)), MESSAGE_SECONDS)


def cleared() -> Any:
    """A page without an image: predictions, maps, the three parts of "What if?", curves, table, checks."""
    return {}, [], gr.HTML([], panes=NOTHING), {}, "", None, None, [], ""


def nothing_seen() -> Any:
    """The tab "Look" without an image."""
    return None, "", "", gr.skip(), gr.skip()


def predicted(viewer: Viewer) -> str:
    """The entry of the list of targets that stands for the predicted one."""
    return MOST_PROBABLE if viewer.outputs == "labels" else PREDICTED


def method_names(value: Any) -> list[str]:
    """The names in a value of the page's list of methods."""
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"methods: expected a list of names, got {value!r}")
    return names


def uploaded_file(value: Any) -> Path | None:
    """The file in a value of the page's image; None if there is no image."""
    if value is None:
        return None
    path = value.get("path") if isinstance(value, dict) else None
    if not isinstance(path, str):
        raise InputError("expected an uploaded image file, got none: upload one or choose an example")
    return Path(path)


def answered(limits: Limits, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `handler`, whose first input is the image: stop it at the limit, and show our errors."""

    @wraps(handler)
    def answer(value: Any, *inputs: Any) -> Any:
        blocks, call = LocalContext.blocks.get(None), LocalContext.event_id.get(None)
        event = blocks._queue.event_ids_to_events.get(call) if blocks is not None and call else None

        def is_connected() -> bool:
            # gradio marks the event of a client that has left
            return blocks is None or (blocks.is_running and (event is None or event.alive))

        image: Path | None = None
        try:
            image = uploaded_file(value)
            with StopWatch(limits.max_seconds, is_connected):
                return handler(image, *inputs)
        except SteadygazeError as error:
            message = str(error)
            if image is not None:  # visitors need not know where their file is stored
                message = message.replace(str(image), image.name)
            raise gr.Error(text(message), MESSAGE_SECONDS, print_exception=False) from error

    return answer


FIRST_METHODS = (DEFAULT, "gae", "rollout", "gradcam")  # selected at the start, if the model supports them
SCORE_INFO = (
    "logit: why this class; lights the whole object. log_odds: why this class and no other; lights what sets "
    "it apart."
)
TEXTS = {
    "look": "What the model attends to, and which patches it sees as similar. Click a patch of the image.",
    "explain": "Warm patches are evidence for the {noun}. Below each map: the {quantity} while patches are "
    "removed, the brightest first, the dimmest first, and in a random order.",
    "verify": "Patches are removed, most relevant first (deletion: the {quantity} should fall early), or "
    "inserted (insertion: it should rise early). One image is not a measurement: `steadygaze verify` "
    "evaluates many, with confidence intervals.",
    "remove": "Click a patch, or drag over several, to remove them; click again to restore them.",
}


def gives_features(viewer: Viewer) -> bool:
    """Whether the viewer's model is a backbone without a classifier."""
    return not needs_prompts(viewer) and not needs_point(viewer) and viewer.outputs == "features"


def build_page(viewer: Viewer) -> gr.Blocks:
    """The page of this viewer."""
    with own_folder() as folder:
        blocks = _look_page(viewer) if gives_features(viewer) else _arranged(viewer)
    guard(blocks, viewer.limits, CSS, KEEP_FILES, folder)
    return blocks


# one call at a time: there is one model; what is clicked while a call runs is answered after it
SETTINGS: dict[str, Any] = {
    "preprocess": False,
    "concurrency_limit": 1,
    "concurrency_id": "model",
    "trigger_mode": "always_last",
}


def _new_blocks() -> gr.Blocks:
    return gr.Blocks(title="steadygaze", analytics_enabled=False, delete_cache=(CLEAN_EVERY, KEEP_FILES))


def _image_input() -> gr.Image:
    """The image that everything is about, at first the first example."""
    examples = [str(path) for path in _examples()]
    image = gr.Image(
        examples[0],
        type="filepath",
        image_mode=None,  # the file as it is
        label="Image",
        sources=["upload", "clipboard"],
        height=220,
        elem_id="sg-upload",
    )
    gr.Examples(examples, image, label="Examples")
    return image


@dataclass(frozen=True)
class LookTab:
    """The components of the tab "Look"."""

    kind: gr.Radio
    layer: gr.Slider
    heads: gr.Row
    mean: gr.Checkbox
    head: gr.Slider
    pixel: gr.Textbox
    start: gr.Button
    seen: gr.Image
    legend: gr.HTML
    caption: gr.HTML

    @classmethod
    def of(cls, viewer: Viewer) -> LookTab:
        """Make the tab in the context of a page."""
        last = len(viewer.vit.blocks) - 1
        first = Events(viewer).drawn(_examples()[0], ATTENTION, last)  # in view before the page asks for it
        with gr.Tab("Look"):
            gr.Markdown(TEXTS["look"])
            kind = gr.Radio(list(LOOKS), value=ATTENTION, show_label=False, container=False)
            with gr.Row():
                layer = gr.Slider(0, max(last, 1), last, step=1, label="Layer", visible=last > 0)
                with gr.Row() as heads:
                    mean = gr.Checkbox(True, label="Mean of all heads")
                    head = gr.Slider(0, 1, 0, step=1, label="Head")
            caption = gr.HTML(text(first.caption), elem_id="sg-look-caption", elem_classes="sg-plain")
            seen = gr.Image(
                first.image,
                type="pil",
                label="Click a patch",
                format="png",
                interactive=False,
                elem_id="sg-look",
            )
            legend = gr.HTML(look_legend(ATTENTION), elem_classes="sg-plain")
            with gr.Row():
                pixel = gr.Textbox(
                    FIRST_POINT, label="Patch at pixel x, y", info="Query of attention, or of similarity"
                )
                start = gr.Button("Without a patch")
        return cls(kind, layer, heads, mean, head, pixel, start, seen, legend, caption)

    def listen(self, viewer: Viewer, image: gr.Image, blocks: gr.Blocks) -> Any:
        """Draw at every change; the page is drawn when it opens. Gives the event of a new image."""
        events = Events(viewer)
        inputs = [image, self.kind, self.layer, self.mean, self.head, self.pixel]
        outputs = [self.seen, self.legend, self.caption, self.heads, self.head]
        # a progress bar would cover the image
        shared = {"inputs": inputs, "outputs": outputs, "show_progress": "hidden", **SETTINGS}
        look = answered(viewer.limits, events.look)
        looking = gr.on([blocks.load, image.change], look, api_name="look", **shared)
        looking.failure(nothing_seen, None, outputs, api_name=False)
        gr.on([self.kind.input, self.mean.input, self.pixel.change], look, api_name=False, **shared)
        # whoever moves the slider wants that head
        chosen = self.head.input(lambda: False, None, self.mean, api_name=False, queue=False)
        chosen.then(look, api_name=False, **shared)
        at_layer = answered(viewer.limits, events.look_at_layer)
        gr.on(self.layer.input, at_layer, api_name="look_at_layer", **shared)
        choose = answered(viewer.limits, events.choose_patch)
        gr.on(self.seen.select, choose, [image], self.pixel, api_name=False, **SETTINGS)
        self.start.click(lambda: FIRST_POINT, None, self.pixel, api_name=False, queue=False)
        return looking


def _look_page(viewer: Viewer) -> gr.Blocks:
    """The page of a backbone without a classifier."""
    with _new_blocks() as blocks:
        gr.HTML(heading(viewer.loaded.name, BACKBONE_PURPOSE), elem_classes="sg-plain")
        with gr.Row(elem_id="sg-main"):
            with gr.Column(elem_id="sg-image"):
                image = _image_input()
            with gr.Column(elem_id="sg-questions"), gr.Tabs():
                look = LookTab.of(viewer)
        look.listen(viewer, image, blocks)
    return blocks


def _arranged(viewer: Viewer) -> gr.Blocks:
    asks, points = needs_prompts(viewer), needs_point(viewer)
    model = viewer
    if asks or points:
        viewer = with_prompts(model, FIRST_PROMPTS) if asks else with_point(model, FIRST_POINT)
    events = Events(viewer)
    noun, values = NOUNS[viewer.outputs], viewer.outputs == "values"
    unit = "" if values else "Percent, "
    texts = {"noun": noun, "quantity": "value" if values else "probability"}
    targets = viewer.classes if values else [predicted(viewer), *viewer.classes]
    with _new_blocks() as blocks:
        gr.HTML(heading(viewer.loaded.name), elem_classes="sg-plain")
        with gr.Row(elem_id="sg-main"):
            with gr.Column(elem_id="sg-image"):
                image = _image_input()
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
                look = LookTab.of(viewer)
                with gr.Tab("Why?"):
                    gr.Markdown(TEXTS["explain"].format(**texts))
                    explain = gr.Button("Explain", variant="primary")
                    legends = [gr.HTML(legend(False, noun), elem_classes="sg-plain")]
                    checks = gr.HTML(elem_id="sg-checks", elem_classes="sg-plain")
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
                competing = viewer.outputs == "classes" and len(viewer.classes) > 1
                score = gr.Dropdown(
                    [*scores, BOTH_SCORES] if competing else scores,
                    value=DEFAULT_SCORE,
                    label="Score",
                    info=SCORE_INFO if competing else None,
                )
                check = gr.Checkbox(True, label="Check each map by removing its brightest patches")
                signed = gr.Checkbox(label=f"Also show evidence against the {noun}")
        request, board_parts = [image, methods, target, score], [board, changed, summary]
        everything = [predictions, gallery, *board_parts, *plots, table, checks]

        def on(trigger: Any, handler: Any, inputs: Any, outputs: Any, **names: Any) -> Any:
            if asks or points:
                change, box = (with_prompts, prompts) if asks else (with_point, pixel)
                handler, inputs = with_box(model, handler.__name__, change), [inputs[0], box, *inputs[1:]]
            answer = answered(viewer.limits, handler)
            listen = trigger if callable(trigger) else partial(gr.on, trigger)
            return listen(answer, inputs, outputs, **names, **SETTINGS)

        if asks:
            prompts.change(_targets, prompts, target, api_name=False)
        if points:
            _listen_for_points(model, image, pixel, seen, blocks)
            loading = on(pixel.change, events.load, [image], everything, api_name=False)
            loading.failure(cleared, None, everything, api_name=False)
        # one after the other: an image that cannot be read gets one message
        looking = look.listen(viewer, image, blocks)
        looking.failure(cleared, None, everything, api_name=False)
        loading = on(looking.success, events.load, [image], everything, api_name="load")
        loading.failure(cleared, None, everything, api_name=False)
        on(
            [explain.click, signed.change],
            events.explain,
            [*request, signed, check],
            [predictions, gallery, checks],
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
    return blocks


def _listen_for_points(model: Viewer, image: Any, pixel: Any, seen: Any, blocks: gr.Blocks) -> None:
    """Mark the pixel on the image that the model sees, and let a click there choose another."""

    def mark(file: Any, text: Any) -> Any:
        return marked(model, file, text)

    def choose(file: Any, event: gr.SelectData) -> str:
        return clicked(model, file, event.index)

    gr.on(
        [blocks.load, image.change, pixel.change],
        answered(model.limits, mark),
        [image, pixel],
        seen,
        api_name=False,
        **SETTINGS,
    )
    gr.on(seen.select, answered(model.limits, choose), [image], pixel, api_name=False, **SETTINGS)


def _targets(prompts: str) -> Any:
    """The list of targets for other prompts."""
    try:
        return gr.Dropdown([PREDICTED, *prompt_lines(prompts)], value=PREDICTED)
    except InputError:  # still being typed
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
