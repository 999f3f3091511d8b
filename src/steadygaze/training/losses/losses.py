"""Losses that steady a model's gaze. Each is a function; one with several terms returns them by name, unweighted.

| function     | terms                                | source                                                            |
| relevance    | background, foreground, confidence   | Chefer et al. 2022; docs/equations.md#relevance-losses            |
| gradmask     | background, classification           | Simpson et al. 2019; docs/equations.md#gradmask                   |
| rrr          | background, classification           | Ross et al. 2017; docs/equations.md#rrr                           |
| adl          | a scalar                             | Guo et al. 2023; docs/equations.md#adl                            |
| distillation | a scalar                             | Hinton et al. 2015 (soft); Touvron et al. 2021 (hard, token)      |

Masks are (B, H, W): 255 object, 128 border (left out), 0 background; or booleans; or shares of the object in 0..1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.data.confusion import IGNORED
from steadygaze.data.masks import BORDER, OBJECT
from steadygaze.errors import BadInput, UnknownName
from steadygaze.method_registry import Method
from steadygaze.target import resolve
from steadygaze.trace import Seam, Want
from steadygaze.training.differentiable_maps import joined, live_map
from steadygaze.vit import ViT
from steadygaze.vit.view import logits_of

Terms = dict[str, Tensor]
EPS = 1e-8


# -- masks --------------------------------------------------------------------------------------------------------


def sides(masks: Tensor, images: Tensor, *, reverse: str = "complement") -> tuple[Tensor, Tensor, Tensor]:
    """(S, S̄, measured), each (B, H, W): object, its reverse, and 1 where a pixel counts.

    reverse: "complement" is 1 − S; "reference" leaves shares between 0 and 1 as they are, as the authors' code does.
    """
    one_of("reverse", reverse, ("complement", "reference"))
    masks = masks[:, 0] if masks.dim() == 4 and masks.shape[1] == 1 else masks
    expected = (len(images), *images.shape[-2:])
    if tuple(masks.shape) != expected:
        raise BadInput(f"masks: expected {expected}, the size of the images, got {tuple(masks.shape)}")
    measured = torch.ones_like(masks, dtype=images.dtype)
    if masks.dtype == torch.uint8:
        known = {0, 1} if int(masks.max()) <= 1 else {0, BORDER, OBJECT}
        if other := set(masks.unique().tolist()) - known:
            raise BadInput(
                f"masks: expected 255 (object), 128 (border) and 0, or 1 and 0; got {sorted(other)[:8]}"
            )
        s = (masks == max(known)).to(images.dtype)
        measured = (masks != BORDER).to(images.dtype)
    else:
        s = masks.to(images.dtype)
        if not (float(s.min()) >= 0 and float(s.max()) <= 1):  # a mask with a NaN is neither
            raise BadInput(
                f"masks: expected shares of the object in 0..1, got {float(s.min()):.3g}..{float(s.max()):.3g}"
            )
    empty = (s.flatten(1).sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise BadInput(
            f"masks: image(s) {empty} of the batch are background everywhere: there is nothing to look at. Leave them out."
        )
    rest = 1 - s if reverse == "complement" else torch.where(s == 1, 0.0, torch.where(s == 0, 1.0, s)).to(s)
    return s, rest * measured, measured


def one_of(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise UnknownName(what, str(given), known)


# -- relevance ----------------------------------------------------------------------------------------------------


def relevance(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    masks: Tensor,
    labels: Int[Tensor, " b"] | None = None,
    *,
    method: str | Method = "gae",
    explained: Literal["label", "predicted"] = "label",
    confidence: Literal["predicted", "label"] = "predicted",
    second_order: bool = False,
    temperature: float = 1.0,
    reverse: Literal["complement", "reference"] = "reference",
) -> Terms:
    """background, foreground and confidence, from one pass over the model. The paper's weights: 1.6, 0.24, 0.2.

    r̂ is the map, bilinear to the picture's size, min-max over its pixels (0..1);
    background = mean (r̂ S̄)², foreground = mean (r̂ S − S)², confidence = cross-entropy of logits / temperature.
    method: what makes the map; explained: the class it is of; confidence: the class that is made more certain, by default
    what the model itself says. second_order: differentiate the gradient inside the map too.
    """
    return relevance_pass(
        model, images, masks, labels, method=method, explained=explained, confidence=confidence, second_order=second_order,
        temperature=temperature, reverse=reverse,
    )[0]  # fmt: skip


def relevance_pass(
    model: nn.Module | ViT, images: Tensor, masks: Tensor, labels: Tensor | None, *, method: str | Method = "gae",
    explained: str = "label", confidence: str = "predicted", second_order: bool = False, temperature: float = 1.0,
    reverse: str = "reference",
) -> tuple[Terms, Any]:  # fmt: skip
    """The terms of `relevance`, and the logits of the same pass for what else is asked of them."""
    one_of("explained", explained, ("label", "predicted"))
    one_of("confidence", confidence, ("predicted", "label"))
    if labels is None and "label" in (explained, confidence):
        raise BadInput(
            "relevance: expected labels. Give them, or explained='predicted' and confidence='predicted'."
        )
    if not temperature > 0:
        raise BadInput(f"relevance: temperature must be above 0, got {temperature}")
    s, rest, measured = sides(masks, images, reverse=reverse)
    with differentiable("relevance"):
        found, logits = live_map(
            model, images, labels if explained == "label" else None, method, second_order=second_order
        )
    r = stretched(found, (images.shape[-2], images.shape[-1]))
    y = joined(logits)
    sought = labels_of(labels, y) if confidence == "label" else y.detach().argmax(-1)
    count = measured.sum()
    terms = {
        "background": (r * rest).pow(2).sum() / count,
        "foreground": (r * s - s).pow(2).sum() / count,
        "confidence": F.cross_entropy(y / temperature, sought),
    }
    return terms, logits


@contextmanager
def differentiable(who: str) -> Iterator[None]:
    """Gradients inside a loss are taken also where none is asked for, so that torch.no_grad() gives its value."""
    if torch.is_inference_mode_enabled():
        raise BadInput(
            f"{who}: it takes gradients inside, which torch.inference_mode() forbids. Use torch.no_grad() for its value."
        )
    with torch.enable_grad():
        yield


def labels_of(labels: Any, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
    """The labels, one for each image; others are refused."""
    found = None if labels is None else resolve(labels, logits)
    if found is None or found.dim() != 1:
        raise BadInput(f"labels: expected one class for each of {len(logits)} images, got {labels!r}")
    return found


def stretched(found: Float[Tensor, "b gh gw"], size: tuple[int, int]) -> Float[Tensor, "b h w"]:
    """A map at the picture's size (bilinear), then 0..1 over each picture's pixels; a map that is zero stays zero."""
    r = F.interpolate(found[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    low, high = r.amin((1, 2), keepdim=True), r.amax((1, 2), keepdim=True)
    return (r - low) / (high - low).clamp_min(1e-12)


# -- gradients of the picture -------------------------------------------------------------------------------------


def gradmask(model: nn.Module | ViT, images: Float[Tensor, "b c h w"], masks: Tensor, labels: Int[Tensor, " b"], *,
             form: Literal["formula", "code"] = "formula",
             reverse: Literal["complement", "reference"] = "reference") -> Terms:  # fmt: skip
    """background = mean ((∂y_label/∂image) S̄)², classification = cross-entropy with the label.

    form: "formula" differentiates the gradient again, so that the term reaches the weights; "code" is what the authors of relevance
    finetuning ran as a baseline, where the term is a number without any gradient.
    """
    return picture_gradient("gradmask", model, images, masks, labels, form, reverse)[0]


def rrr(model: nn.Module | ViT, images: Float[Tensor, "b c h w"], masks: Tensor, labels: Int[Tensor, " b"], *,
        form: Literal["formula", "code"] = "formula",
        reverse: Literal["complement", "reference"] = "reference") -> Terms:  # fmt: skip
    """background = Σ ((∂ Σ_k log(p_k + 1e-11)/∂image) S̄)² over the whole batch, classification = cross-entropy with the label.

    form: as for `gradmask`.
    """
    return picture_gradient("rrr", model, images, masks, labels, form, reverse)[0]


def picture_gradient(name: str, model: Any, images: Tensor, masks: Tensor, labels: Tensor, form: str,
                     reverse: str) -> tuple[Terms, Any]:  # fmt: skip
    """The terms of `gradmask` or `rrr`, and the logits of the same pass."""
    one_of("form", form, ("formula", "code"))
    _, rest, measured = sides(masks, images, reverse=reverse)
    pixels = images.detach().requires_grad_()
    seam = Seam(
        want=Want(hidden=False, attention=form == "formula")
    )  # double backward: not through the fused kernel
    seam.lenient = True
    with differentiable(name):
        with seam:
            logits = outputs_of(model(pixels))
        y = joined(logits)
        labels = labels_of(labels, y)
        quantity = (
            y.gather(1, labels[:, None]).sum() if name == "gradmask" else (y.softmax(-1) + 1e-11).log().sum()
        )
        (g,) = torch.autograd.grad(quantity, pixels, retain_graph=True, create_graph=form == "formula")
    squares = (g * rest[:, None]).pow(2).sum()
    background = squares / (measured.sum() * images.shape[1]) if name == "gradmask" else squares
    return {"background": background, "classification": F.cross_entropy(y, labels)}, logits


def outputs_of(output: Any) -> Any:
    """The logits of whatever a model returns; a pair where a distillation token is trained."""
    return (
        output
        if isinstance(output, tuple) and all(isinstance(y, Tensor) for y in output)
        else logits_of(output)
    )


# -- attention diversification --------------------------------------------------------------------------------------


def adl(attentions: Sequence[Float[Tensor, "b h n n"]], *, tau: float = 2.0,
        form: Literal["paper", "code", "per_head"] = "paper") -> Float[Tensor, ""]:  # fmt: skip
    """Attention diversification: how much the queries of a layer look at the same tokens, mean over layers; 0..1, lower is more diverse.

    M = mean over heads, t = tau / N, M̂ = M where M ≥ t, m̂ = mean_i M̂_i, loss = mean over layers, images and rows of cos(m̂, M̂_i).
    form: "paper" as just said (equations 1 and 2); "code" thresholds by > and takes m̂ from the mean of the whole rows, where that is
    above t (0 where no column is), and divides by the layers + 1e-6; "per_head" is "paper" for each head by itself.

    >>> round(adl([torch.tensor([[[[0.9, 0.1], [0.9, 0.1]]]])], tau=1.0).item(), 6)
    1.0
    """
    if not isinstance(attentions, Sequence) or not attentions:
        got = (
            f"one tensor {tuple(attentions.shape)}"
            if isinstance(attentions, Tensor)
            else "none"
            if not attentions
            else repr(attentions)
        )
        raise BadInput(f"adl: expected a sequence of (B, H, N, N) attentions, one for each layer, got {got}")
    check_adl(tau, form)
    for a in attentions:
        if not isinstance(a, Tensor) or a.dim() != 4:
            got = str(tuple(a.shape)) if isinstance(a, Tensor) else f"a {type(a).__name__}"
            raise BadInput(f"adl: expected tensors of shape (B, H, N, N), got {got}")
    total = torch.stack(
        [similarity(a.flatten(0, 1) if form == "per_head" else a.mean(1), tau, form) for a in attentions]
    ).sum()
    return total / (len(attentions) + (1e-6 if form == "code" else 0.0))


def check_adl(tau: float, form: str) -> None:
    one_of("form", form, ("paper", "code", "per_head"))
    if not tau > 0:
        raise BadInput(f"adl: tau must be above 0, got {tau}")


def similarity(m: Float[Tensor, "b q k"], tau: float, form: str) -> Float[Tensor, ""]:
    """mean over images and rows of cos(m̂, M̂_i), as û · mean_i û_i: the rows are passed over a few times only."""
    threshold = tau / m.shape[-1]
    if form == "code":
        seen = torch.where(m > threshold, m, 0.0)
        middle = m.mean(1)
        middle = torch.where(middle > threshold, middle, 0.0)
    else:
        seen = torch.where(m >= threshold, m, 0.0)
        middle = seen.mean(1)
    norms = seen.square().sum(-1).clamp_min(EPS**2).sqrt()
    directions = torch.einsum("bq,bqk->bk", norms.reciprocal(), seen) / m.shape[1]
    lengths = middle.square().sum(-1).clamp_min(EPS**2).sqrt()
    return ((middle * directions).sum(-1) / lengths).mean()


# -- labels ---------------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: Float[Tensor, "b c *hw"], labels: Tensor, *, smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """With classes (B,) or their shares (B, C), mean over pictures; with label maps (B, H, W), mean over the pixels that count.

    Where a step is cut into pieces, each has a mean of its own pixels: pieces with more border weigh the rest of theirs a little more.
    """
    if labels.dim() != 3:
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return total / (labels != IGNORED).sum().clamp_min(1)


# -- distillation ---------------------------------------------------------------------------------------------------


def distillation(student: Any, teacher: Float[Tensor, "b c"], *, form: Literal["soft", "hard"] = "hard",
                 temperature: float = 3.0) -> Float[Tensor, ""]:  # fmt: skip
    """How far the student is from the teacher; at least 0.

    soft: T² KL(softmax(teacher / T) ‖ softmax(student / T)), mean over the batch; hard: cross-entropy with the teacher's class.
    student: logits, or (class, distillation) logits: then the distillation token is taught, and the class token left to the labels.

    >>> y = torch.tensor([[1.0, 2.0]]); distillation(y, y, form="soft").item()
    0.0
    """
    one_of("form", form, ("soft", "hard"))
    if not temperature > 0:
        raise BadInput(f"distillation: temperature must be above 0, got {temperature}")
    taught = student if isinstance(student, Tensor) else student[-1]
    if taught.shape != teacher.shape:
        raise BadInput(
            f"distillation: expected the same classes, the student gives logits {tuple(taught.shape)}, the teacher {tuple(teacher.shape)}"
        )
    teacher = teacher.detach()
    if form == "hard":
        return F.cross_entropy(taught, teacher.argmax(-1))
    t = temperature
    return (
        t
        * t
        * F.kl_div(
            (taught / t).log_softmax(-1),
            (teacher / t).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
    )


# -- the papers' values ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """Weights of a baseline as its users published them for one model."""

    classification: float
    background: float
    learning_rate: float


RRR = {
    "ViT-B": Preset(2e-6, 1e-10, 2e-6),
    "AR-S": Preset(2e-8, 1e-8, 1e-5),
    "AR-B": Preset(2e-7, 1e-8, 5e-7),
    "DeiT-S": Preset(2e-6, 1e-10, 1e-5),
    "DeiT-B": Preset(2e-6, 1e-10, 5e-6),
}
GRADMASK = {
    "ViT-B": Preset(3e-9, 50.0, 2e-4),
    "AR-S": Preset(3e-9, 50.0, 5e-4),
    "AR-B": Preset(3e-9, 50.0, 1e-5),
    "DeiT-S": Preset(3e-9, 50.0, 5e-3),
    "DeiT-B": Preset(3e-9, 50.0, 1e-3),
}
