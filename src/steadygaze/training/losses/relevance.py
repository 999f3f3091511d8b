"""The relevance loss: maps that lie on the object, and a confident prediction (Chefer et al. 2022).

Equations: docs/equations.md#relevance-losses and docs/equations.md#second-order.

    L = weight · (relevance · (background · L_bg + foreground · L_fg) + confidence · L_cls)
    L_bg = mean (r̂ S̄)²      L_fg = mean (r̂ S − S)²      L_cls = cross-entropy of logits / temperature

| symbol | variable      | meaning                                                                   |
| r̂      | r             | the map, bilinear to the size of the image, scaled to 0..1 over its pixels |
| S, S̄   | s, background | object and background, (B, H, W)                                           |

The paper's weights of L_bg, L_fg and L_cls are 1.6, 0.24 and 0.2: the defaults of the recipe.

The map keeps its graph, so that training can change what a model attends to; one forward pass gives both the
map and the logits. `second_order=False` is what the authors ran: the gradient G inside a map is a constant,
and the loss reaches the weights only through A (or x). `second_order=True` differentiates G too, and reaches
every weight. What a method's own rules hold constant (σ, slopes) is constant in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.data.masks import BORDER, OBJECT
from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.methods.aggregate import aggregate, layers
from steadygaze.methods.registry import Method, parse_method, rules_of, unavailable
from steadygaze.target import resolve_target, target_value
from steadygaze.trace import PLAIN, Attention, Forward, Trace, Want, forward
from steadygaze.training.losses.registry import (
    Loss,
    LossBatch,
    LossOptions,
    LossSetup,
    NonNegative,
    Positive,
    class_logits,
    register_loss,
)
from steadygaze.vit.adapt import adapt
from steadygaze.vit.view import Layout, ViT

Pixels = Float[Tensor, "b h w"]


def object_and_background(
    masks: Tensor, images: Tensor, *, reverse: str = "complement"
) -> tuple[Pixels, Pixels, Pixels]:
    """(S, S̄, counted), each (B, H, W): object, background, and 1 where a pixel is counted.

    Args:
        masks: (B, H, W), or (B, K, H, W) whose union is the object; 255 object, 128 border (not counted), 0
            background; or 1 and 0; or booleans; or the object's share of each pixel as floats in 0..1 or
            0..255.
        reverse: "complement" is S̄ = 1 − S; "reference" keeps shares between 0 and 1 as they are, as the
            authors' code does.
    """
    if reverse not in ("complement", "reference"):
        raise UnknownNameError("reverse", str(reverse), ("complement", "reference"))
    masks = masks.amax(1) if masks.dim() == 4 and masks.shape[1] else masks
    expected = (len(images), *images.shape[-2:])
    if tuple(masks.shape) != expected:
        raise InputError(f"masks: expected {expected}, the size of the images, got {tuple(masks.shape)}")
    low, high = float(masks.min()), float(masks.max())
    if not (low >= 0 and high <= OBJECT):  # also false for NaN
        raise InputError(f"masks: expected shares of the object in 0..1 or 0..255, got {low:.3g}..{high:.3g}")
    scale, border = (1 if high <= 1 else OBJECT), masks == BORDER
    is_code = (masks == 0) | (masks == scale) | border
    if not bool(is_code.all()):
        if not masks.is_floating_point():
            other = masks[~is_code].unique().tolist()
            raise InputError(
                f"masks: expected 255 (object), 128 (border) and 0, or 1 and 0; got {other[:8]}. If these "
                "are shares of the object, give floats: masks / 255. If they are classes: masks == the class."
            )
        border = torch.zeros_like(border)  # 128 of 255 is a share like any other
    counted = (~border).to(images.dtype)
    s = (masks.to(images.dtype) / scale).masked_fill(border, 0.0)
    empty = (s.flatten(1).sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise InputError(
            f"masks: image(s) {empty} of the batch are background everywhere, without any object. "
            "Leave them out."
        )
    if reverse == "complement":
        background = 1 - s
    else:
        background = torch.where(s == 1, 0.0, torch.where(s == 0, 1.0, s)).to(s)
    return s, background * counted, counted


@dataclass(frozen=True, eq=False)
class DifferentiableTrace(Trace):
    """A trace whose attentions and hidden states are still in the graph of the weights."""

    def seen(self, attention: Attention) -> Float[Tensor, "b heads q k"]:
        return attention.a

    def tokens(self, layer: int) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
        x = self.run.hidden[layer]
        return x, self.grad(x)


def differentiable_map(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    target: Any = None,
    method: str | Method = "gae",
    *,
    second_order: bool = False,
) -> tuple[Float[Tensor, "b gh gw"], Any]:
    """(map, outputs) of one pass, both in the graph of the model's weights.

    The outputs are the model's logits, or a pair if a distillation token is trained. A method whose rules
    change the backward pass (`gaze`, `decompx`) runs a second pass for them.
    """
    vit, m = adapt(model), parse_method(method) if isinstance(method, str) else method
    no_graph = not m.base.differentiable
    reason = unavailable(m, vit) or ("it runs the model by itself, and leaves no graph" if no_graph else "")
    if reason:
        raise _not_trainable(m.name, reason, vit)
    rules = rules_of(m) if m.base.gradient else PLAIN
    # attention also for double backward, which the fused kernel does not have
    needs = {**m.needs, "attention": True}
    want = Want(hidden=m.base.kind == "map", **needs)
    first = min(layers(m, len(vit.blocks)))
    outputs: list[Any] = []

    def head(x: Tensor, layout: Layout) -> Tensor:
        outputs.append(vit.plan.head(x, layout))
        return class_logits(outputs[0])

    view = ViT(vit.model, replace(vit.plan, head=head))
    watch = 0 if second_order else first
    run = forward(view, vit.embed(images), rules=rules, want=want, watch=watch, cut=False)
    trace = DifferentiableTrace(run)
    if m.base.gradient:
        classes: Any = target if callable(target) else resolve_target(target, run.logits)
        value = target_value(classes, m.score, run.logits)
        trace = _with_gradients(run, value, None if callable(target) else classes, first, second_order)
    scores = aggregate(trace, m)
    if torch.is_grad_enabled() and run.logits.requires_grad and not scores.requires_grad:
        if m.base.gradient and not second_order:
            raise _not_trainable(m.name, "its map is made of the gradient alone: use second_order=True", vit)
        raise _not_trainable(m.name, "it leaves no graph", vit)
    return scores, outputs[0] if rules == PLAIN else vit.logits(vit.embed(images))


TRAINABLE = ("gae", "rollout", "raw_attention", "ixg+plus", "gaze")


def _not_trainable(method: str, reason: str, vit: ViT) -> MethodUnavailableError:
    """The error, with the usual methods that this model has."""
    able = [name for name in TRAINABLE if name != method and not unavailable(parse_method(name), vit)]
    advice = f" Use {' or '.join(filter(None, (', '.join(able[:-1]), able[-1])))}." if able else ""
    return MethodUnavailableError(f"{method} cannot be trained: {reason.rstrip('.')}.{advice}")


def _with_gradients(
    run: Forward, value: Tensor, classes: Any, first: int, second_order: bool
) -> DifferentiableTrace:
    """The trace with the gradients of `value` that a method may read, in the graph if `second_order`."""
    records = run.records[first:]
    tensors = [a.a for record in records for a in record.attention if a.a.requires_grad]
    tensors += [x for x in run.hidden[first:] if x.requires_grad] if run.want.hidden else []
    tensors += [y for record in records for y in record.norms if y.requires_grad]
    tensors += [y for record in records for y, *_ in (*record.terms, *record.rest) if y.requires_grad]
    distinct = list({id(t): t for t in tensors}.values())
    grads = torch.autograd.grad(
        value.sum(), distinct, retain_graph=True, create_graph=second_order, allow_unused=True
    )
    return DifferentiableTrace(run, {id(t): g for t, g in zip(distinct, grads, strict=True)}, classes)


Terms = dict[str, Tensor]
PixelTerms = Callable[[Pixels, Pixels, Pixels, Pixels], Terms]  # of r, S, S̄ and what is counted


def squares(r: Pixels, s: Pixels, background: Pixels, counted: Pixels) -> Terms:
    """L_bg and L_fg."""
    count = counted.sum()
    return {
        "background": (r * background).pow(2).sum() / count,
        "foreground": (r * s - s).pow(2).sum() / count,
    }


def relevance_pass(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    masks: Tensor,
    labels: Int[Tensor, " b"] | None = None,
    *,
    method: str | Method = "gae",
    explained: str = "label",
    confidence: str = "predicted",
    second_order: bool = False,
    temperature: float = 1.0,
    reverse: str = "reference",
    pixel_terms: PixelTerms = squares,
) -> tuple[Terms, Any]:
    """Compute the terms of the map and `confidence`, unweighted, in one pass over the model.

    Args:
        masks: See `object_and_background`, which also explains `reverse`.
        method: What makes the map.
        explained: The class the map is of, "label" or "predicted".
        confidence: The class made more certain, "predicted" (the paper) or "label".
        second_order: Differentiate the gradient inside the map too.
        pixel_terms: Compares the map with object and background.

    Returns:
        The terms by name, and the outputs of the same pass for other losses.
    """
    for key, value in (("explained", explained), ("confidence", confidence)):
        if value not in ("label", "predicted"):
            raise UnknownNameError(key, str(value), ("label", "predicted"))
    if labels is None and "label" in (explained, confidence):
        raise InputError(
            "relevance: expected labels. Give them, or explained='predicted' and confidence='predicted'."
        )
    if not temperature > 0:
        raise InputError(f"relevance: temperature must be above 0, got {temperature}")
    s, background, counted = object_and_background(masks, images, reverse=reverse)
    target = labels if explained == "label" else None
    with gradients_enabled("relevance"):
        scores, outputs = differentiable_map(model, images, target, method, second_order=second_order)
    r = to_pixels(scores, (images.shape[-2], images.shape[-1]))
    y = class_logits(outputs)
    certain = checked_labels(labels, y) if confidence == "label" else y.detach().argmax(-1)
    terms = pixel_terms(r, s, background, counted)
    return terms | {"confidence": F.cross_entropy(y / temperature, certain)}, outputs


@contextmanager
def gradients_enabled(loss: str) -> Iterator[None]:
    """Enable gradients for losses made of gradients, also under torch.no_grad(), for their value alone."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            f"{loss}: it takes gradients inside, which torch.inference_mode() forbids. "
            "Use torch.no_grad() for its value."
        )
    with torch.enable_grad():
        yield


def checked_labels(labels: Any, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
    """The labels, one class index for each image; anything else is an error."""
    try:
        classes = None if labels is None else resolve_target(labels, logits)
    except InputError as error:
        raise InputError(f"labels: {str(error).removeprefix('target: ')}") from None
    if classes is None or classes.dim() != 1:
        raise InputError(f"labels: expected one class for each of {len(logits)} images, got {labels!r}")
    return classes


def to_pixels(scores: Float[Tensor, "b gh gw"], size: tuple[int, int]) -> Float[Tensor, "b h w"]:
    """A map at the size of the image (bilinear), scaled to 0..1; an all-zero map stays zero."""
    r = F.interpolate(scores[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    low, high = r.amin((1, 2), keepdim=True), r.amax((1, 2), keepdim=True)
    return (r - low) / (high - low).clamp_min(1e-12)


class MapOptions(LossOptions):
    """Options of losses of a map; `confident_of` is the class made more certain."""

    method: str = "gae"
    explained: Literal["label", "predicted"] = "label"
    confident_of: Literal["predicted", "label"] = "predicted"
    second_order: bool = False
    temperature: Positive = 1.0
    reverse: Literal["complement", "reference"] = "reference"


class RelevanceOptions(MapOptions):
    """Weights of the relevance loss."""

    relevance: NonNegative = 0.8
    confidence: NonNegative = 0.2
    background: NonNegative = 2.0
    foreground: NonNegative = 0.3

    @property
    def term_weights(self) -> Mapping[str, float]:
        return {
            "background": self.relevance * self.background,
            "foreground": self.relevance * self.foreground,
            "confidence": self.confidence,
        }


@register_loss("relevance", options=RelevanceOptions)
class Relevance(Loss):
    """Moves attribution maps onto the object and keeps predictions confident (Chefer et al. 2022)."""

    terms = ("background", "foreground", "confidence")
    needs_masks = True
    runs_model = True
    tasks = ("classification",)
    options: MapOptions
    pixel_terms: PixelTerms = staticmethod(squares)

    def __init__(self, options: MapOptions, setup: LossSetup) -> None:
        super().__init__(options, setup)
        self.vit = adapt(setup.model)

    def __call__(self, batch: LossBatch) -> Terms:
        assert batch.masks is not None
        o = self.options
        names = {"method", "explained", "second_order", "temperature", "reverse"}
        options = o.model_dump(include=names)
        method = parse_method(o.method)
        own_rules = method.base.gradient and rules_of(method) != PLAIN
        # The attention that the map keeps is that of the model itself, unless the method changes the pass by
        # its rules.
        with nullcontext() if own_rules else batch.observed():
            terms, outputs = relevance_pass(
                self.vit,
                batch.images,
                batch.masks,
                batch.labels,
                confidence=o.confident_of,
                pixel_terms=self.pixel_terms,
                **options,
            )
        batch.share(outputs)
        return terms
