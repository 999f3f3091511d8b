"""`explain`: from a model and images to attribution maps.

Methods share passes: one forward pass for each setting of rules, one backward pass for each score and
class; a method that only reads attention uses a forward pass that runs anyway.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, overload
from warnings import warn

import torch
from torch import Tensor, nn

from steadygaze.data.transforms import Transform
from steadygaze.errors import (
    BrokenMapError,
    DegenerateMapWarning,
    ImagesOutOfRangeWarning,
    InputError,
    MethodUnavailableError,
)
from steadygaze.loading.ask import display_names, each_region, pose
from steadygaze.loading.inputs import Images, at_once, prepare_inputs
from steadygaze.methods.aggregate import layers, shares
from steadygaze.methods.check import with_checks
from steadygaze.methods.learned import with_files
from steadygaze.methods.registry import (
    DEFAULT,
    Method,
    ModelMethod,
    list_methods,
    parse_method,
    parse_methods,
    rules_of,
    unavailable,
)
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.questions.detections import Detection
from steadygaze.questions.features import FeatureTarget
from steadygaze.questions.regions import Region
from steadygaze.questions.vqa import VisualQuestion
from steadygaze.results.attribution import Attribution, concatenate
from steadygaze.results.comparison import Attributions
from steadygaze.target import (
    CallableTarget,
    Outputs,
    Target,
    check_score,
    class_indices,
    default_score,
    resolve_target,
    target_value,
)
from steadygaze.trace import PLAIN, Forward, Query, Rules, Trace, Want, forward
from steadygaze.trace.completeness import Shares, position_tokens
from steadygaze.vit.adapt import adapt
from steadygaze.vit.clean_forward import CleanForward
from steadygaze.vit.contexts import constant_weights, evaluation_mode, without_autocast
from steadygaze.vit.image_range import range_note
from steadygaze.vit.view import ViT


class HoldsModel(Protocol):
    """Anything with a `model`, such as the result of `load_model`."""

    @property
    def model(self) -> nn.Module: ...


Model = nn.Module | ViT | HoldsModel | str | Path
MethodName = str | Method
Methods = list[str] | list[Method] | list[MethodName] | tuple[MethodName, ...]
Question = str | Region | Detection | FeatureTarget
Targets = Target | Question | Sequence[str] | Sequence[Region] | Sequence[Detection]


@overload
def explain(
    model: Model,
    images: Images,
    target: Targets = None,
    method: MethodName = DEFAULT,
    *,
    score: str | None = None,
    check: bool = False,
    transform: Transform | None = None,
    calibration: Any = None,
    on_progress: OnProgress = ignore_progress,
) -> Attribution: ...
@overload
def explain(
    model: Model,
    images: Images,
    target: Targets = None,
    *,
    method: Methods,
    score: str | None = None,
    check: bool = False,
    transform: Transform | None = None,
    calibration: Any = None,
    on_progress: OnProgress = ignore_progress,
) -> Attributions: ...
def explain(
    model: Any,
    images: Any,
    target: Any = None,
    method: Any = DEFAULT,
    *,
    score: str | None = None,
    check: bool = False,
    transform: Transform | None = None,
    calibration: Any = None,
    on_progress: OnProgress = ignore_progress,
) -> Attribution | Attributions:
    """Compute attribution maps: how much evidence each patch of an image is for a class.

    Args:
        model: A vision transformer of timm, transformers or torchvision, a name or folder for `load_model`,
            the result of `load_model`, of `ask` or of `zero_shot`, an object of `transformers.pipeline`, or a
            `ViT`.
        images: A path, a PIL image, a numpy array (H, W, 3) of uint8, a list or folder of them; or images
            preprocessed for the model, a floating-point tensor (B, 3, H, W). A tensor is one batch, and so
            are images with a callable target; other images run in batches of bounded size.
        target: The class to explain: None (the predicted one), an index or a name, one index per image, (B,
            K) for several per image, or a callable logits -> (B,) that returns the quantity itself. For a
            multi-label model a label (None: the most probable); for a regression model the index of a value;
            for a model that compares images with text (CLIP, SigLIP, open_clip) a prompt; for a segmenter a
            `Region`; for YOLOS a `Detection`; for a backbone without a classifier `similar_to(image)`,
            `component(k, images)` or `feature_norm()`, and None for methods that need no class. A list of K
            names or prompts are K targets of each image; a list of regions or detections is one for each
            image.
        method: A name such as "gaze" or "ixg+plus", a `steadygaze.method(...)`, or a list of them.
        score: The quantity of the class to explain: "logit", "log_prob", "log_odds", "contrast" or "prob";
            None is the method's own. A label has no contrast; of a value, the value itself is explained.
            The logit is evidence for the class, also where it is shared with similar classes, and lights the
            whole object; the log-odds are evidence for this class and no other, and light what sets it apart.
        check: Whether to measure each map by removing its patches, about five forward passes for each map and
            ten for random orders: the result's `check` has the curves, and figures show them.
        transform: How images that are not a tensor are preprocessed: a callable from an RGB image of PIL to a
            tensor (3, H, W), such as a `Compose` of torchvision. By default the preprocessing of the loaded
            model, or the one that a module of timm or transformers declares.
        calibration: Of the method "calibrated": the result of `calibrate`, or the file it was saved to.
        on_progress: Called with a `Progress` between batches and during long searches. An interrupted
            search returns the map of the runs that were done, with a `PartialMapWarning`.

    Returns:
        An `Attribution`, whose `scores` (B, rows, columns) are signed: higher is more evidence for the class.
        For a list of methods, `Attributions`, a dict of them by name. Both show themselves in a notebook, and
        keep the images in 8 bits, so that `overlay()`, `figure()` and `save("map.png")` need no argument.

    Raises:
        InputError: If images, target or score do not fit the model, or how the model preprocesses images is
            not known.
        ImageError: If an image file cannot be read.
        UnknownNameError: If a method, class or score is not known.
        MethodUnavailableError: If a method cannot explain this model.
        UnsupportedModelError: If the model is not a vision transformer that `adapt` can view.

    Examples:
        >>> import torch
        >>> from steadygaze import load_model
        >>> loaded = load_model("embedded")
        >>> explain(loaded, torch.zeros(1, 3, 32, 32), target="cat").scores.shape
        torch.Size([1, 8, 8])

        One line, from a file to a figure:

        ```python
        sg.explain("deit_tiny_patch16_224", "cat.jpg").save("map.png")
        ```
    """
    method = method if calibration is None else _calibrated(method, calibration)
    inputs = prepare_inputs(model, images, transform)
    regions = each_region(target, inputs.images)
    if regions is None:
        several = None if isinstance(images, Tensor) or callable(target) else at_once(inputs.images)
        results = _explain(
            inputs.model, inputs.images, target, method, score, check, on_progress, transform, several
        )
    else:
        parts = [
            _explain(inputs.model, inputs.images[i : i + 1], region, method, score, check, on_progress)
            for i, region in enumerate(regions)
        ]
        results = {name: concatenate([part[name] for part in parts]) for name in parts[0]}
    kept = {
        name: replace(result, images=inputs.shown, names=inputs.names) for name, result in results.items()
    }
    return next(iter(kept.values())) if isinstance(method, (str, Method)) else Attributions(kept)


def _calibrated(requested: Any, calibration: Any) -> Any:
    """What was requested, with the method "calibrated" reading the calibration."""
    alone = isinstance(requested, (str, Method))
    names = [requested] if alone else list(requested)
    with_calibration = with_files(names, {"calibrated": calibration})
    if len(with_calibration) > len(names):
        raise InputError(
            'calibration: it is used by method="calibrated" only, which is not among the requested methods. '
            "Add it, or leave calibration out",
            option="calibration",
        )
    return with_calibration[0] if alone else with_calibration


def _explain(
    model: Any,
    images: Tensor,
    target: Any,
    method: Any,
    score: str | None,
    check: bool,
    on_progress: OnProgress,
    transform: Transform | None = None,
    at_once: int | None = None,
) -> dict[str, Attribution]:
    """`explain` for preprocessed images with one target for all of them, by the name of the method.

    Args:
        at_once: Number of images in a batch; None: all.
    """
    classifier, target = pose(model, images, target, transform)
    vit = adapt(classifier)
    target = vit.plan.main_value if target is None else target
    requested = parse_methods(method)
    chosen = list({m.name: m for m in requested.values()}.values())
    if check and vit.plan.outputs == "features" and target is None:
        raise InputError(
            "check: no quantity of the features is explained, so there is none to measure without patches. "
            "Give a target, such as sg.similar_to(other_image), or leave check out.",
            option="check",
        )
    parts: list[dict[str, Attribution]] = []
    for some, of_some in _batches(images, target, at_once, on_progress):
        clean = CleanForward.of(vit, some)
        if not parts and (note := range_note(classifier, clean.images)):
            warn(note, ImagesOutOfRangeWarning, stacklevel=3)
        found = explain_batch(clean, of_some, chosen, score, on_progress, details=True)
        parts.append(with_checks(clean, found, of_some) if check else found)
    results = {m.name: concatenate([part[m.name] for part in parts]) for m in chosen}
    classes = display_names(classifier, results[chosen[0].name].logits.shape[1])
    return {name: replace(results[m.name], classes=classes) for name, m in requested.items()}


def _batches(
    images: Tensor, target: Any, at_once: int | None, on_progress: OnProgress
) -> Iterator[tuple[Tensor, Any]]:
    """Images and their targets in batches of at most `at_once`, reported between them; None: one batch."""
    if at_once is None or len(images) <= at_once:
        yield images, target
        return
    each = None if target is None else class_indices(target, len(images))
    for start in range(0, len(images), at_once):
        on_progress(Progress("explain", start, len(images), "images"))
        some = slice(start, start + at_once)
        yield images[some], None if each is None else each[some]
    on_progress(Progress("explain", len(images), len(images), "images"))


def explain_batch(
    clean: CleanForward,
    target: Any,
    methods: list[Method],
    score: str | None,
    on_progress: OnProgress = ignore_progress,
    allow_partial: bool = True,
    details: bool = False,
) -> dict[str, Attribution]:
    """`explain` for images that others embed too; attributions by name of the method.

    Args:
        clean: The images; its tokens and logits are used, so that they are computed once.
        details: Whether attributions have `parts`, and those of a question the scores of its words.
    """
    vit = clean.vit
    if score is not None:
        check_score(score, vit.plan.outputs)
    if score is not None and callable(target):
        raise InputError(f"score={score!r}: a callable target returns the whole quantity. Leave score out.")
    if vit.plan.outputs == "features" and not callable(target):
        _check_class_free(target, methods, vit)
    for m in methods:
        if reason := unavailable(m, vit):
            raise MethodUnavailableError(f"{m.name}: {reason}")
    with without_autocast(vit.model), evaluation_mode(vit.model), constant_weights(vit.model):
        batch = _Batch(clean, target, score, on_progress, allow_partial, details)
        results = batch.explain(methods)
        if details and isinstance(vit.model, VisualQuestion):
            results = {name: batch.with_words(result) for name, result in results.items()}
    return results


def _check_class_free(target: Any, methods: list[Method], vit: ViT) -> None:
    """Raise an error unless nothing about a class is requested of a model that gives features."""
    needing = [m.name for m in methods if m.class_specific]
    if target is None and not needing:
        return
    need = f", and {needing[0]} needs a quantity to explain" if needing else ""
    known = [parse_method(info.name) for info in list_methods()]
    free = [m.name for m in known if not m.class_specific and not unavailable(m, vit)]
    raise InputError(
        f"target: this {vit.plan.kind} has no classifier, so no class to explain{need}. Give a quantity of "
        "its features: sg.similar_to(other_image), --similar-to FILE on the command line, "
        "sg.component(0, images), sg.feature_norm(), or a callable target, features (B, D) -> (B,); or use "
        f"methods that need none: {', '.join(free)}.",
        option="target",
    )


@dataclass(frozen=True)
class _Batch:
    """One call of `explain`: images and the quantity to explain."""

    clean: CleanForward
    target: Any
    score: str | None
    on_progress: OnProgress
    allow_partial: bool
    details: bool

    @property
    def vit(self) -> ViT:
        return self.clean.vit

    def explain(self, methods: list[Method]) -> dict[str, Attribution]:
        """Attributions of all methods by name, from as few passes as possible."""
        tokens = self.clean.tokens
        logits: Tensor | None = None
        hidden: tuple[Tensor, ...] = ()
        reads_hidden = any(isinstance(m.base, ModelMethod) and m.base.reads_hidden for m in methods)
        maps: dict[str, list[Shares]] = {}
        position = self.position(methods)
        for rules, one_pass in plan_passes(methods, len(self.vit.blocks)).items():
            run = one_pass.run(self.vit, tokens, rules)
            if logits is None:
                logits = run.logits.detach()
                hidden = (tokens, *(h.detach() for h in run.hidden[1:])) if reads_hidden else ()
            for column in self.columns(logits):
                self.add_maps(maps, run, one_pass.methods, column, position)
            del run  # one graph in memory at a time
        if logits is None and reads_hidden:
            run = forward(self.vit, tokens, grad=False)
            logits, hidden = run.logits, run.hidden
        for m in methods:
            if not isinstance(m.base, ModelMethod):
                continue
            recorded = None
            if m.base.recorded is not None:
                recorded = m.base.recorded(self.vit, tokens, rules_of(m), **m.function_options)
                logits = recorded.logits.detach() if logits is None else logits
            logits = self.clean.logits if logits is None else logits
            queries = [self.query(m, column, hidden, logits, recorded) for column in self.columns(logits)]
            scores = [m.base.function(query, **m.function_options) for query in queries]
            maps[m.name] = [s if isinstance(s, Shares) else Shares(s) for s in scores]
        assert logits is not None  # some method has run
        results = {}
        for m in methods:  # a loop: a comprehension has a frame of its own, which `stacklevel` would count
            results[m.name] = self.attribution(m, maps[m.name], logits)
        return results

    def with_words(self, result: Attribution) -> Attribution:
        """The result for a question, with the scores of its words by the same method."""
        words = self.vit.model.words(self.clean.images.shape[-2:])  # type: ignore[operator]
        view, m = adapt(words), parse_method(result.method)
        if unavailable(m, view):
            return result
        target = self.target if result.target is None else result.target
        clean = CleanForward(view, self.clean.images)
        scores = replace(self, clean=clean, target=target).explain([m])[m.name].scores
        names, merged = words.merged(scores[..., 0, :])
        return replace(result, words=names, word_scores=merged)

    def query(
        self,
        m: Method,
        target: Tensor | CallableTarget,
        hidden: tuple[Tensor, ...],
        logits: Tensor,
        run: Forward | None = None,
    ) -> Query:
        return Query(
            self.vit,
            self.clean.images,
            self.clean.tokens,
            target,
            score=self.score_of(m),
            rules=rules_of(m),
            hidden=hidden,
            logits=logits,
            run=run,
            on_progress=self.on_progress,
            allow_partial=self.allow_partial,
        )

    def position(self, methods: list[Method]) -> Tensor | None:
        """Position embeddings, if a map is input x gradient at the input of block 0 and has to be split."""
        split = self.details and any(m.input_x_gradient and m.aggregator == "first" for m in methods)
        return position_tokens(self.vit, self.clean.images) if split else None

    def attribution(self, m: Method, maps: list[Shares], logits: Tensor) -> Attribution:
        classes = resolve_target(self.target, logits, self.outputs)
        several = classes is not None and classes.dim() == 2

        def joined(tensors: list[Tensor]) -> Tensor:
            return (torch.stack(tensors, 1) if several else tensors[0]).detach()

        scores = joined([shares.scores for shares in maps])
        _check_map(m, scores)
        rest = [shares.unattributed for shares in maps if shares.unattributed is not None]
        parts = [shares.parts for shares in maps if shares.parts is not None]
        score = "callable" if callable(self.target) else "none" if classes is None else self.score_of(m)
        return Attribution(
            scores=scores,
            target=classes,
            logits=logits,
            method=m.name,
            score=score,
            outputs=self.outputs,
            unattributed=joined(rest) if rest else None,
            parts={name: joined([part[name] for part in parts]) for name in parts[0]} if parts else None,
        )

    @property
    def outputs(self) -> Outputs:
        return self.vit.plan.outputs

    def score_of(self, m: Method) -> str:
        """The requested score, or the method's own."""
        return self.score or default_score(m.score, self.outputs)

    def columns(self, logits: Tensor) -> list[Any]:
        """What is explained, one after the other: a callable, or (B,) classes for each of K targets; None for
        methods that need no class, on features.
        """
        classes = resolve_target(self.target, logits, self.outputs)
        if classes is None:
            return [self.target]
        return list(classes.unbind(1)) if classes.dim() == 2 else [classes]

    def add_maps(
        self,
        maps: dict[str, list[Shares]],
        run: Forward,
        methods: tuple[Method, ...],
        target: Any,
        position: Tensor | None,
    ) -> None:
        """The maps of all methods that use one forward pass; one backward pass for each score."""
        classes = target if isinstance(target, Tensor) else None
        traces: dict[str | None, Trace] = {}
        for m in methods:
            key = self.score_of(m) if m.base.gradient else None
            if key not in traces:
                value = None if key is None else target_value(target, key, run.logits, self.outputs)
                traces[key] = run.trace(value, classes, retain=True)
            maps.setdefault(m.name, []).append(shares(traces[key], m, position))


@dataclass(frozen=True)
class Pass:
    """A forward pass that several methods share: what it records, and from which layers on."""

    methods: tuple[Method, ...] = ()
    want: Want = field(default_factory=lambda: Want(hidden=False))
    start: int | None = None  # the first layer with gradients; None: no gradients
    watch: int | None = None  # the first layer whose attention and so on are recorded

    def including(self, m: Method, depth: int) -> "Pass":
        """This pass, extended to what `m` needs."""
        first = min(layers(m, depth))
        want = self.want | Want(hidden=m.base.kind == "map", **m.needs)
        start = _minimum(self.start, first) if m.base.gradient else self.start
        watch = _minimum(self.watch, first) if any(m.needs.values()) else self.watch
        return Pass((*self.methods, m), want, start, watch)

    def run(self, vit: ViT, tokens: Tensor, rules: Rules) -> Forward:
        """Run the model, recording what the methods need."""
        depth = len(vit.blocks)
        start = depth if self.start is None else self.start
        watch = depth if self.watch is None else self.watch
        grad = self.start is not None
        return forward(vit, tokens, rules=rules, want=self.want, start=start, watch=watch, grad=grad)


def _minimum(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)


def plan_passes(methods: list[Method], depth: int) -> dict[Rules, Pass]:
    """The forward passes that serve all methods, one for each setting of rules.

    Methods that only read attention join the first pass.
    """
    passes: dict[Rules, Pass] = {}
    layered = [m for m in methods if m.base.kind != "model"]
    for m in sorted(layered, key=lambda m: not m.base.gradient):
        shared = PLAIN if PLAIN in passes else next(iter(passes), PLAIN)
        rules = rules_of(m) if m.base.gradient else shared
        passes[rules] = passes.get(rules, Pass()).including(m, depth)
    return passes


def _check_map(m: Method, scores: Tensor) -> None:
    """Raise an error for a map with NaN, and warn of a map that is zero everywhere."""
    if not torch.isfinite(scores).all():
        raise BrokenMapError(
            f"{m.name}: the map has NaN or infinite values. Use the model in float32, "
            f"or check its weights for NaN."
        )
    empty = (scores.flatten(-2) == 0).all(-1)
    if empty.any():
        which = empty.nonzero()[:, 0].unique().tolist()
        message = f"{m.name}: the map is zero everywhere for image(s) {which}: there is no evidence in it."
        warn(message, DegenerateMapWarning, stacklevel=7)
