"""What the page shows for one image: attention, features, predictions, maps, removal curves, predictions
without patches.

Every result is computed from the image: only the image and a list of patches are kept between two clicks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from steadygaze.app.limits import DEFAULT_LIMITS, CallStoppedError, Limits, check_cost, check_method
from steadygaze.data.decoding import to_rgb
from steadygaze.data.images import read_image
from steadygaze.errors import DegenerateMapWarning, InputError, SteadygazeError
from steadygaze.faithfulness.inputs import RATIOS, CachedForward
from steadygaze.faithfulness.removal import NAMES, VALUE_NAMES, removal
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.look.attention import attention
from steadygaze.look.drawing import checked_index, draw_frame, overlay
from steadygaze.look.features import Features, features
from steadygaze.methods.explain import explain
from steadygaze.methods.learned import with_files
from steadygaze.methods.registry import Method, parse_method
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.quantity import percent
from steadygaze.results.attribution import Attribution
from steadygaze.results.check import draw_check, stack
from steadygaze.results.drawing import to_pil_image
from steadygaze.runs.plan import choose
from steadygaze.target import NOUNS, Outputs, predictions, summarize
from steadygaze.vit.adapt import adapt
from steadygaze.vit.removal import HidingMode, available_hiding, ranking, subset_logits
from steadygaze.vit.view import ViT

SIDE = 672  # pixels of the longer side of images that are shown, or a little fewer
MAX_PIXEL_ART = 128  # images up to this side are enlarged without smoothing
RANDOM = "random"
REMOVAL_TEXTS = {
    "remove": "removed",
    "mask": "hidden from attention",
    "fill": "painted in the mean color",
}

QUERY_TEXTS = {
    "class": "the class token",
    "mean": "the mean of all patches",
    "answer": "the tokens that the answer is read from",
}
PCA_OPACITY = 0.8

ImageInput = Image.Image | str | Path | bytes
Pixel = tuple[int, int]  # x and y in the image that the model sees
Patch = tuple[int, int]  # row and column


OnProblem = Callable[[SteadygazeError], None]


@dataclass(frozen=True)
class RemovalCurves:
    """Probability of a class (or a value) while patches are removed or inserted in the order of a map.

    Attributes:
        deletion: Points (share of the patches that are removed, probability or value).
        insertion: Points (share of the patches that are inserted, probability or value).
        scores: The removal metrics, in percent; of values in their own unit.
    """

    method: str
    deletion: tuple[tuple[float, float], ...]
    insertion: tuple[tuple[float, float], ...]
    scores: dict[str, float]


@dataclass(frozen=True)
class Look:
    """A layer of the model, drawn over the image.

    Attributes:
        caption: What is drawn, in words.
        heads: Number of heads of the layer; None where heads do not matter.
        head: The head that is drawn; None: the mean of all heads.
    """

    image: Image.Image
    caption: str
    heads: int | None = None
    head: int | None = None


@dataclass(frozen=True, eq=False)
class Viewer:
    """One model and what can be shown about it.

    Attributes:
        learned: Files of learned methods, by the method's name.
    """

    loaded: LoadedModel
    learned: Mapping[str, Path] = field(default_factory=dict)
    limits: Limits = DEFAULT_LIMITS

    @classmethod
    def of(
        cls,
        model: LoadedModel | nn.Module,
        learned: Mapping[str, Path] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Viewer:
        """Make the viewer of a loaded model, or of a module that carries its preprocessing."""
        return cls(load_model(model), learned or {}, limits)

    @cached_property
    def vit(self) -> ViT:
        return adapt(self.loaded)

    @cached_property
    def methods(self) -> list[str]:
        """Names of the methods that this model supports."""
        return [method.name for method in choose(self.vit, ["all"])] + list(self.learned)

    @cached_property
    def classes(self) -> list[str]:
        """The class names. A name that several classes have is followed by the number of each."""
        logits = self._logits(torch.zeros(1, *self.vit.plan.input_size, device=self._device))
        names = self.loaded.class_names or ("",) * logits.shape[1]
        return distinct([name or f"{NOUNS[self.outputs]} {number}" for number, name in enumerate(names)])

    @cached_property
    def removal_mode(self) -> HidingMode:
        """How patches are left out: "remove", or the closest that the model allows."""
        blank = torch.zeros(1, *self.vit.plan.input_size, device=self._device)
        return available_hiding(self.vit, self.vit.embed(blank))

    @property
    def outputs(self) -> Outputs:
        """What the model gives: classes, labels or values."""
        return self.vit.plan.outputs

    @property
    def metrics(self) -> tuple[str, ...]:
        """The removal metrics that `removal_curves` measures."""
        return VALUE_NAMES if self.outputs == "values" else NAMES

    def predictions(self, image: ImageInput | None, without: Collection[int] = ()) -> dict[str, float]:
        """Class -> probability (or value -> its number), without some patches (numbers in raster order)."""
        tensor = self._tensor(image)
        logits = self._logits_without(tensor, without) if without else self._logits(tensor)
        numbers = predictions(self.outputs, logits[0].double())
        return dict(zip(self.classes, numbers.tolist(), strict=True))

    def prediction_label(self, image: ImageInput | None, without: Collection[int] = ()) -> Any:
        """`predictions` for a list of bars; values, which have none, as a text."""
        numbers = self.predictions(image, without)
        if self.outputs != "values":
            return numbers
        return summarize(self.outputs, list(numbers.values()), self._short_names)

    def maps(
        self,
        image: ImageInput | None,
        methods: Sequence[str],
        target: str | None = None,
        score: str | None = None,
        *,
        check: bool = False,
        on_progress: OnProgress = ignore_progress,
        on_problem: OnProblem | None = None,
    ) -> dict[str, Attribution]:
        """The maps of several methods. target: an entry of `classes`, a number or a name; None: predicted.

        Args:
            check: Whether the maps get their removal curves.
            on_problem: Called with the error of each method that has no map; by default the first one is
                raised. If no method has a map, it is always raised.
        """
        problems: list[SteadygazeError] = []
        requested = self._requested(methods, problems)
        tensor, class_index = self._tensor(image), self._class_index(target)

        def maps_of(some: list[Method]) -> dict[str, Attribution]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DegenerateMapWarning)  # an empty map is visible
                return explain(
                    self.vit,
                    tensor,
                    class_index,
                    method=some,
                    score=score,
                    check=check,
                    on_progress=on_progress,
                )

        found = _each_that_works(maps_of, list(requested.values()), problems)
        if problems and (on_problem is None or not found):
            raise problems[0]
        for problem in problems:
            assert on_problem is not None
            on_problem(problem)
        return {name: found[m.name].to("cpu") for name, m in requested.items() if m.name in found}

    def overlays(
        self, image: ImageInput, maps: dict[str, Attribution], signed: bool = False, mode: str = "bicubic"
    ) -> list[tuple[Image.Image, str]]:
        """Every map over the image, with the name of the method and the class; mode: of resizing.

        Below a map that was checked are its removal curves.
        """
        shown = self.shown(image)
        drawn = []
        for name, attribution in maps.items():
            overlay = attribution.overlay(shown, signed=signed, mode=mode)
            if attribution.check is not None:
                curves = draw_check(attribution.check, width=overlay.width, font_size=overlay.width // 28)
                room = Image.new("RGB", (overlay.width, overlay.width // 12), "white")  # for the caption
                overlay = stack([overlay, curves, room])
            drawn.append((overlay, f"{name}: {attribution.title(0, self._short_names)}"))
        return drawn

    def check_texts(self, maps: dict[str, Attribution]) -> dict[str, str]:
        """What removing the brightest patches does, a sentence for each map that was checked."""
        texts = {name: attribution.check_text(0, self._short_names) for name, attribution in maps.items()}
        return {name: text for name, text in texts.items() if text}

    def removal_curves(self, image: ImageInput, maps: dict[str, Attribution]) -> list[RemovalCurves]:
        """Removal curves and scores of every map on this image, and of a random ranking."""
        tensor = self._tensor(image)
        with_random = maps if RANDOM in maps else {**maps, **self.maps(image, [RANDOM], "0")}
        first = next(iter(maps.values()))
        assert first.target is not None
        target = first.target.to(tensor.device)
        stacked = torch.stack([attribution.scores.to(tensor) for attribution in with_random.values()])
        with torch.no_grad():
            whole = CachedForward(self.vit, tensor)
            values = removal(whole, stacked, target, RATIOS)
        start = float(whole.probabilities[0, target[0]])
        lost, unit = ("value", 1) if self.outputs == "values" else ("aopc", 100)

        def predicted(kind: str, row: int) -> list[float]:
            """Probability at every ratio; the detail of a metric is `unit` (p of the whole image - p)."""
            detail = values[f"{kind}_{lost}"].detail
            assert detail is not None
            return [start - loss / unit for loss in detail[row, 0].tolist()]

        curves = []
        for row, name in enumerate(with_random):
            deletion = zip((0.0, *RATIOS), (start, *predicted("deletion", row)), strict=True)
            insertion = zip((*RATIOS, 1.0), (*predicted("insertion", row), start), strict=True)
            scores = {metric: float(values[metric].value[row, 0]) for metric in self.metrics}
            curves.append(RemovalCurves(name, tuple(deletion), tuple(insertion), scores))
        return curves

    def split(self, attribution: Attribution, share: float) -> tuple[list[int], list[int]]:
        """The most relevant patches of a map, this share of all patches, and the others."""
        order = ranking(attribution.scores)[0].tolist()
        count = round(share * len(order))
        return order[:count], order[count:]

    def attention_overlay(
        self,
        image: ImageInput | None,
        layer: int = -1,
        head: int | None = None,
        pixel: Pixel | None = None,
        *,
        nearest_head: bool = False,
    ) -> Look:
        """What a head attends to, over the image.

        Args:
            head: None: the mean of all heads.
            pixel: The query is the patch at this pixel, which gets a frame. None: the class token, or the
                mean of all patches of a model without one.
            nearest_head: Whether a head that the layer does not have stands for its last one.

        Raises:
            MethodUnavailableError: If the attention of this layer cannot be read.
        """
        tensor = self._tensor(image)
        read = replace(attention(self.vit, tensor), shown=(self._shown(tensor),))
        layer = checked_index("layer", layer, len(read))
        query: Patch | None = None
        if pixel is not None:
            last = read.tokens_of(layer)[-1]
            assert isinstance(last, tuple)  # row and column: patches are the last tokens
            query = self._patch(pixel, (last[0] + 1, last[1] + 1))
        if nearest_head and isinstance(head, int):
            head = min(head, read.heads(layer) - 1)
        drawn = read.overlay(layer, "mean" if head is None else head, query)
        heads = read.heads(layer)  # known after the layer has run once
        head = None if head is None else checked_index("head", head, heads)
        of = f"mean of {heads} heads" if head is None else f"head {head} of {heads}"
        asked = QUERY_TEXTS[read.query_of(layer)] if query is None else f"patch {query}"
        return Look(drawn, f"Attention of layer {layer}, {of}. Query: {asked}.", heads, head)

    def similar(self, image: ImageInput | None, layer: int = -1, pixel: Pixel | None = None) -> Look:
        """Which patches have features like those of one patch: cosine similarity, over the image.

        Args:
            pixel: A pixel of the patch; None: the center of the image.
        """
        tensor = self._tensor(image)
        found, number = self._features(tensor, layer)
        height, width = self.loaded.size
        patch = self._patch((width // 2, height // 2) if pixel is None else pixel, found.grid)
        values = found.similarity(0, patch)[0]
        # from the least similar patch on: in late layers, all patches are alike to some degree
        drawn = overlay(values - values.min(), self._shown(tensor))
        draw_frame(drawn, found.grid, patch)
        low, high = float(values.min()), float(values.max())
        return Look(
            drawn,
            f"Cosine similarity of features of layer {number} to patch {patch}: {low:.2f} to {high:.2f}.",
        )

    def pca(self, image: ImageInput | None, layer: int = -1) -> Look:
        """The first three principal components of the patches' features as red, green and blue."""
        tensor = self._tensor(image)
        found, number = self._features(tensor, layer)
        result = found.pca(min(3, *found.values.flatten(0, 2).shape))
        colors = to_pil_image(result.colors[0].permute(2, 0, 1).float().cpu().numpy())
        shown = self._shown(tensor)
        drawn = Image.blend(shown, colors.resize(shown.size, Image.Resampling.NEAREST), PCA_OPACITY)
        share = percent(float(result.explained.sum()))
        return Look(
            drawn,
            f"Principal components of the features of layer {number} as colors, {share} of the variance: "
            "patches of similar colors have similar features.",
        )

    def shown(self, image: ImageInput) -> Image.Image:
        """What the model sees, enlarged; small images without blur."""
        return self._shown(self._tensor(image))

    def _shown(self, tensor: Tensor) -> Image.Image:
        seen = self.loaded.to_image(tensor[0])
        side = max(seen.size)
        if side <= MAX_PIXEL_ART:  # every pixel becomes a square
            scale = SIDE // side
            return seen.resize((seen.width * scale, seen.height * scale), Image.Resampling.NEAREST)
        size = round(seen.width * SIDE / side), round(seen.height * SIDE / side)
        return seen.resize(size, Image.Resampling.LANCZOS)

    def summary(self, image: ImageInput, without: Collection[int]) -> str:
        """Describe how many patches are left out, and how that changes the prediction, in one sentence."""
        rows, columns = self.vit.grid
        before, after = self.predictions(image), self.predictions(image, without)
        removed = f"{len(without)} of {rows * columns} patches {REMOVAL_TEXTS[self.removal_mode]}."
        if self.outputs != "classes":
            texts = [
                summarize(self.outputs, list(values.values()), self._short_names)
                for values in (before, after)
            ]
            return f"{removed} Before: {texts[0]}. Now: {texts[1]}."
        predicted, now = (max(values, key=lambda name: values[name]) for values in (before, after))
        verb = "still predicts" if predicted == now else "now predicts"
        change = f"{predicted}: {percent(before[predicted])} → {percent(after[predicted])}."
        return f"{removed} The model {verb} {now} ({percent(after[now])}). {change}"

    # -- methods --------------------------------------------------------------------------------------

    def _requested(self, names: Sequence[str], problems: list[SteadygazeError]) -> dict[str, Method]:
        """The methods by name; what is wrong with one of them is added to `problems`."""
        if not names:
            raise InputError("expected at least one method, got none: choose one from the list")
        if len(names) > self.limits.max_methods:
            raise InputError(
                f"expected at most {self.limits.max_methods} methods in one call, got {len(names)}"
            )
        requested: dict[str, Method] = {}
        for name in names:
            try:
                requested[name] = self._method(name)
            except SteadygazeError as error:
                problems.append(error)
        check_cost(requested.values(), self.limits)
        return requested

    def _method(self, name: str) -> Method:
        method = parse_method(name)
        check_method(method, self.limits)
        file = self.learned.get(method.base.name)
        if file is None:
            return method
        (with_file,) = with_files([method], {method.base.name: file})
        assert isinstance(with_file, Method)
        return with_file

    # -- looking ---------------------------------------------------------------------------------------

    def _features(self, tensor: Tensor, layer: int) -> tuple[Features, int]:
        """Features at a layer, and the layer's number counted from 0."""
        number = checked_index("layer", layer, len(self.vit.blocks))
        return features(self.vit, tensor, number), number

    def _patch(self, pixel: Pixel, grid: tuple[int, int]) -> Patch:
        """The patch that a pixel is in."""
        height, width = self.loaded.size
        x, y = (checked_index(name, at, n) for name, at, n in zip("xy", pixel, (width, height), strict=True))
        return y * grid[0] // height, x * grid[1] // width

    # -- tensors ---------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    @property
    def _short_names(self) -> list[str] | None:
        names = self.loaded.class_names
        return None if names is None else [name.split(",")[0] for name in names]

    def _class_index(self, target: str | None) -> int | None:
        if target is None:
            return None
        return self.classes.index(target) if target in self.classes else self.loaded.class_index(target)

    def _tensor(self, image: ImageInput | None) -> Tensor:
        if image is None:
            raise InputError("expected an image, got none: upload one or choose an example")
        rgb = to_rgb(image) if isinstance(image, Image.Image) else read_image(image, apart=True)
        return self.loaded.preprocess(rgb)[None].to(self._device)

    @torch.no_grad()
    def _logits(self, tensor: Tensor) -> Tensor:
        return self.vit(tensor)

    @torch.no_grad()
    def _logits_without(self, tensor: Tensor, without: Collection[int]) -> Tensor:
        tokens = self.vit.embed(tensor)
        rows, columns = self.vit.grid
        keep = torch.ones(1, rows * columns, dtype=torch.bool, device=tensor.device)
        keep[0, list(without)] = False
        owner = torch.zeros(1, dtype=torch.long, device=tensor.device)
        return subset_logits(self.vit, tensor, tokens, keep, owner, self.removal_mode)


def distinct(names: Sequence[str]) -> list[str]:
    """Names of which no two are equal: those that occur several times are followed by their number.

    Examples:
        >>> distinct(["crane", "cat", "crane"])
        ['crane (0)', 'cat', 'crane (2)']
    """
    count = Counter(names)
    numbered = [f"{name} ({number})" for number, name in enumerate(names)]
    some = [long if count[name] > 1 else name for name, long in zip(names, numbered, strict=True)]
    return some if len(set(some)) == len(some) else numbered


def _each_that_works(
    maps_of: Callable[[list[Method]], dict[str, Attribution]],
    methods: list[Method],
    problems: list[SteadygazeError],
) -> dict[str, Attribution]:
    """The maps of all methods at once; if that fails, of one method after the other."""
    if not methods:
        return {}
    try:
        return maps_of(methods)
    except CallStoppedError:
        raise
    except SteadygazeError as error:
        if len(methods) == 1:
            problems.append(error)
            return {}
    maps: dict[str, Attribution] = {}
    for method in methods:
        maps |= _each_that_works(maps_of, [method], problems)
    return maps
