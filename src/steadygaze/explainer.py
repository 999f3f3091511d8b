"""`explain`: from a model and images to maps. Methods share their passes: one forward for each setting of rules, one backward for each
score and class; a method that only reads attention rides along."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, overload
from warnings import warn

import torch
from torch import Tensor, nn

from steadygaze.aggregate import aggregate, layers, resize_map
from steadygaze.errors import BadInput, BrokenMap, DegenerateMap, MethodUnavailable, UnknownName
from steadygaze.heatmap import Attribution
from steadygaze.method_registry import DEFAULT, Method
from steadygaze.methods import parse_method
from steadygaze.target import SCORES, Target, quantity, resolve
from steadygaze.trace import PLAIN, Forward, Rules, Trace, Want, forward, frozen
from steadygaze.vit import ViT, adapt
from steadygaze.vit.evaluation_mode import evaluation_mode, without_autocast
from steadygaze.vit.view import remember

Named = str | Method


@overload
def explain(model: nn.Module | ViT, images: Tensor, target: Target = None, method: Named = DEFAULT,
            score: str | None = None) -> Attribution: ...  # fmt: skip
@overload
def explain(model: nn.Module | ViT, images: Tensor, target: Target = None, *, method: list[Named] | list[str] | list[Method],
            score: str | None = None) -> dict[str, Attribution]: ...  # fmt: skip
def explain(model: Any, images: Any, target: Any = None, method: Any = DEFAULT,
            score: Any = None) -> Attribution | dict[str, Attribution]:  # fmt: skip
    """Which patches made the model say this?

    images: (B, 3, H, W), as the model's own transform gives them. target: None (the predicted class), an index, one for each image,
    (B, K) for several, or a callable logits -> (B,). score: "logit", "log_prob", "log_odds", "contrast"; None is the method's own.
    Gives an `Attribution` with signed `scores` (B, rows, columns), higher means more for the class; a dict by name for a list of methods.
    """
    vit = adapt(model)
    several = not isinstance(method, (str, Method))
    asked = _chosen(method)
    chosen = list({m.name: m for m in asked.values()}.values())
    if score is not None and score not in SCORES:
        raise UnknownName("score", str(score), SCORES)
    if score is not None and callable(target):
        raise BadInput(f"score={score!r}: a callable target is the whole quantity already. Leave score out.")
    if not vit.plan.classes and not callable(target):
        raise BadInput(
            f"target: this {vit.plan.kind} has no classifier, so there is no class to explain. Give it one, or a callable target: features "
            f"(B, D) -> (B,), such as their similarity to a text's embedding."
        )
    for m in chosen:
        why = unavailable(m, vit)
        if why:
            raise MethodUnavailable(f"{m.name}: {why}")
    with without_autocast(vit.model), evaluation_mode(vit.model):
        results = _explain(vit, _prepared(vit, images), target, chosen, score)
    return {name: results[m.name] for name, m in asked.items()} if several else results[chosen[0].name]


def _chosen(method: Any) -> dict[str, Method]:
    """The methods that are asked for, by the text they were asked by."""
    asked = (
        [method]
        if isinstance(method, (str, Method))
        else list(method)
        if isinstance(method, Iterable)
        else [method]
    )
    if not all(isinstance(m, (str, Method)) for m in asked):
        raise BadInput(f"method: expected a name, a steadygaze.method(...) or a list of them, got {method!r}")
    if not asked:
        raise BadInput("method: expected at least one method, got an empty list")
    return {str(m): m if isinstance(m, Method) else parse_method(m) for m in asked}


def unavailable(method: Method, vit: ViT) -> str:
    """Why `vit` cannot serve `method`; empty if it can."""
    serves = method.base.unsupported
    layer = next((type(m) for m in vit.model.modules() if ".quantized." in f"{type(m).__module__}."), None)
    if layer is not None and method.base.gradient:
        return (
            f"no gradient passes through the model's quantised layers ({layer.__module__}.{layer.__name__}). Explain the model as it was "
            f"before, or use a method without gradients, such as rollout or occlusion."
        )
    if serves is None:
        return ""
    return serves(vit, **{key: value for key, value in method.options if key in signature(serves).parameters})


def rules_of(method: Method) -> Rules:
    """The rules a method's gradient is taken under."""
    if method.base.rules is not None:
        return method.base.rules
    freeze = method.option("freeze")
    freeze = method.base.freeze if freeze is None else freeze
    return PLAIN if freeze is None else frozen(freeze, method.option("slope") or "origin")


@dataclass(frozen=True)
class Ask:
    """What a method that runs the model itself is given."""

    vit: ViT
    images: Tensor
    tokens: Tensor
    rules: Rules
    score: str
    target: Any  # (B,) classes, or a callable
    hidden: tuple[
        Tensor, ...
    ] = ()  # x^0 .. x^{L-1} and the last block's output, for methods registered with hidden=True

    @property
    def grid(self) -> tuple[int, int]:
        return self.vit.layout(self.tokens).grid

    def value(self, logits: Tensor) -> Tensor:
        """The scalar that is explained, one for each image."""
        return value_of(self.target, self.score, logits)

    def gradient(self, x: Tensor, space: str) -> Tensor:
        """∂T/∂x at other tokens, or at other pixels."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            tokens = remember(x, self.vit.layout(self.tokens)) if space == "tokens" else self.vit.embed(x)
            run = forward(self.vit, tokens, rules=self.rules, cut=False)
            return torch.autograd.grad(self.value(run.logits).sum(), x)[0]

    def per_patch(self, x: Tensor, space: str) -> Tensor:
        """Sum what belongs to each patch: channels of its token, or its pixels."""
        if space == "tokens":
            return resize_map(self.vit.blocks[0].patches(x, self.vit.layout(self.tokens)).sum(-1), self.grid)
        pixels, (height, width) = x.sum(1), self.grid
        if pixels.shape[1] % height or pixels.shape[2] % width:
            return resize_map(pixels, self.grid)
        return pixels.unflatten(2, (width, -1)).unflatten(1, (height, -1)).sum((2, 4))


def value_of(target: Any, score: str, logits: Tensor) -> Tensor:
    """The scalar that is explained, one for each image."""
    if not callable(target):
        return quantity(score, logits, target)
    value = target(logits)
    if not isinstance(value, Tensor) or value.shape != logits.shape[:1] or not value.requires_grad:
        got = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        got += " without a gradient" if isinstance(value, Tensor) and not value.requires_grad else ""
        raise BadInput(
            f"target: a callable must give a differentiable tensor of shape ({logits.shape[0]},), got {got}"
        )
    return value


def _prepared(vit: ViT, images: Any) -> Tensor:
    images = vit.check(images)
    parameter = next(vit.model.parameters())
    if images.device != parameter.device:
        raise BadInput(
            f"the images are on {images.device}, the model on {parameter.device}. Use images.to({str(parameter.device)!r})."
        )
    if parameter.dtype == torch.bfloat16 and parameter.device.type == "cpu" and not _bf16_on_cpu():
        raise BadInput(
            "the model is in bfloat16 on a CPU without bfloat16 arithmetic, which takes minutes an image. Use model.float()."
        )
    return images.detach().clone().to(parameter.dtype)


def _bf16_on_cpu() -> bool:
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe and probe())


def _explain(
    vit: ViT, images: Tensor, target: Any, chosen: list[Method], score: str | None
) -> dict[str, Attribution]:
    with torch.no_grad():
        tokens = vit.embed(images)
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()
    reads = any(m.base.reads_hidden for m in chosen)
    maps: dict[str, list[Tensor]] = {}
    for rules, one in _passes(chosen, len(vit.blocks)).items():
        run = one.run(vit, tokens, rules)
        if logits is None:
            logits = run.logits.detach()
            hidden = (tokens, *(h.detach() for h in run.hidden[1:])) if reads else ()
        for column in _columns(target, logits):
            _add_maps(maps, run, one.methods, score, column)
        del run  # one graph at a time
    if logits is None:
        run = forward(vit, tokens, grad=False)
        logits, hidden = run.logits, run.hidden if reads else ()
        del run
    for m in (m for m in chosen if m.base.kind == "model"):
        asks = [
            Ask(vit, images, tokens, rules_of(m), score or m.score, column, hidden)
            for column in _columns(target, logits)
        ]
        maps[m.name] = [m.base.function(ask, **m.function_options) for ask in asks]
    classes = resolve(target, logits)
    results = {}
    for m in chosen:
        scores = (
            torch.stack(maps[m.name], 1) if classes is not None and classes.dim() == 2 else maps[m.name][0]
        )
        _judge(m, scores)
        quantity_of = "callable" if classes is None else score or m.score
        results[m.name] = Attribution(
            scores=scores.detach(), target=classes, logits=logits, method=m.name, score=quantity_of
        )
    return results


def _columns(target: Any, logits: Tensor) -> list[Any]:
    """What is explained, one after the other: a callable, or (B,) classes for each of K targets."""
    classes = resolve(target, logits)
    return [target] if classes is None else list(classes.unbind(1)) if classes.dim() == 2 else [classes]


def _add_maps(
    maps: dict[str, list[Tensor]], run: Forward, served: tuple[Method, ...], score: str | None, target: Any
) -> None:
    """The maps of all methods that one forward pass serves; one backward pass for each score."""
    classes = None if callable(target) else target
    traces: dict[str | None, Trace] = {}
    for m in served:
        key = (score or m.score) if m.base.gradient else None
        if key not in traces:
            value = None if key is None else value_of(target, key, run.logits)
            traces[key] = run.trace(value, classes, retain=True)
        maps.setdefault(m.name, []).append(aggregate(traces[key], m))


@dataclass(frozen=True)
class Pass:
    """A forward pass that serves several methods: what it keeps, and from which layers on."""

    methods: tuple[Method, ...] = ()
    want: Want = field(default_factory=lambda: Want(hidden=False))
    start: int | None = None  # the first layer with gradients; None: no gradients
    watch: int | None = None  # the first layer whose attention and the like are kept

    def serve(self, m: Method, depth: int) -> "Pass":
        """This pass, made to serve `m` too."""
        first = min(layers(m, depth))
        want = Want(hidden=m.base.kind == "map", **m.base.needs(dict(m.options)))
        start = self.start if not m.base.gradient else first if self.start is None else min(self.start, first)
        keeps = any(v for k, v in want.__dict__.items() if k != "hidden")
        watch = self.watch if not keeps else first if self.watch is None else min(self.watch, first)
        return Pass((*self.methods, m), self.want | want, start, watch)

    def run(self, vit: ViT, tokens: Tensor, rules: Rules) -> Forward:
        start, watch = (len(vit.blocks) if at is None else at for at in (self.start, self.watch))
        return forward(
            vit, tokens, rules=rules, want=self.want, start=start, watch=watch, grad=self.start is not None
        )


def _passes(chosen: list[Method], depth: int) -> dict[Rules, Pass]:
    """The passes that serve all methods, one for each setting of rules; methods that only read attention join the first."""
    passes: dict[Rules, Pass] = {}
    layered = [m for m in chosen if m.base.kind != "model"]
    for m in sorted(layered, key=lambda m: not m.base.gradient):
        riding = PLAIN if PLAIN in passes else next(iter(passes), PLAIN)
        rules = rules_of(m) if m.base.gradient else riding
        passes[rules] = passes.get(rules, Pass()).serve(m, depth)
    return passes


def _judge(m: Method, scores: Tensor) -> None:
    """A map with NaN is an error; a map of zeros explains nothing, and is said."""
    if not torch.isfinite(scores).all():
        raise BrokenMap(
            f"{m.name}: the map has NaN or infinite values. Use the model in float32, or look for NaN among its weights."
        )
    empty = (scores.flatten(-2) == 0).all(-1)
    if empty.any():
        which = empty.nonzero()[:, 0].unique().tolist()
        warn(
            f"{m.name}: the map is zero everywhere for image(s) {which}: nothing spoke for the class.",
            DegenerateMap,
            stacklevel=4,
        )
