"""Occlusion: a square over the middle of the image, and curves of accuracy while patches are dropped.

    center square    half the side by default, 112 x 112 of 224 (docs/equations.md#occlusion)
    random drop      a share r of the patches is removed, drawn per image; drops are nested: a patch removed
                     at a small share is removed at every larger one
    salient drop     the same, patches of the highest score first (ties in raster order)

Dropped patches are removed after `embed`, k = int(r·P) of P, prefix tokens stay and every other patch keeps
its position (Naseer et al., arXiv:2105.10497, paint them black instead). A model that needs its whole grid
(Swin) is masked in its attention, as the curve notes. A model that reads only patches has no output when none
is left: 1 / classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.robustness.attacks import checked_labels
from steadygaze.target import at_least_float32
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.masking import masked_logits
from steadygaze.vit.view import ViT

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Curve:
    """The prediction for each image at the shares dropped.

    Attributes:
        shares: Shares of the patches that are dropped.
        right: (B, R), 1 if the prediction is correct, 0 if not; 1 / classes if no patch is left.
        probability: (B, R), of the label.
        means: "removal" or "attention masking".
    """

    shares: tuple[float, ...]
    right: Float[Tensor, "b r"]
    probability: Float[Tensor, "b r"]
    means: str

    @property
    def accuracy(self) -> Float[Tensor, " r"]:
        """Fraction of correct predictions at each share dropped; higher is better."""
        return self.right.mean(0)


def center_square(
    images: Float[Tensor, "b c h w"],
    *,
    share: float = 0.5,
    fill: str = "zero",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Float[Tensor, "b c h w"]:
    """A copy of the normalized images with the middle `share` of each side covered.

    Args:
        fill: "zero" sets the normalized values to zero, the mean color; "black" sets the pixels to zero,
            −mean/std.

    Examples:
        >>> (center_square(torch.ones(1, 3, 8, 8)) == 0).sum().item()  # 4 x 4 pixels of 3 channels
        48
    """
    if not 0 <= share <= 1:
        raise InputError(f"share: expected a share of the side from 0 to 1, got {share}")
    if fill not in ("zero", "black"):
        raise InputError(f"fill: expected 'zero' (after normalization) or 'black' (before it), got {fill!r}")
    color = images.new_zeros(images.shape[1])
    if fill == "black":
        if mean is None or std is None:
            raise InputError("fill='black' needs the mean and std of the normalization, got none")
        color = -images.new_tensor(list(mean)) / images.new_tensor(list(std))
    height, width = images.shape[-2:]
    rows, columns = (round(share * side) for side in (height, width))
    top, left = (height - rows) // 2, (width - columns) // 2
    out = images.clone()
    out[:, :, top : top + rows, left : left + columns] = color.view(1, -1, 1, 1)
    return out


def random_drop(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    *,
    generator: torch.Generator | Sequence[torch.Generator],
    shares: Sequence[float] = SHARES,
) -> Curve:
    """The curve while random patches are dropped.

    Args:
        generator: One for the batch, or one for each image, so that an image's draw does not depend on its
            neighbors.

    Examples:
        >>> import steadygaze as sg
        >>> model, images = sg.load_model("embedded").model, torch.randn(1, 3, 32, 32)
        >>> draws = {"generator": torch.Generator(), "shares": (0.0, 0.5)}
        >>> curve = random_drop(model, images, torch.tensor([3]), **draws)
        >>> curve.right.shape
        torch.Size([1, 2])
    """

    def order(patches: int) -> Tensor:
        if isinstance(generator, torch.Generator):
            drawn = [torch.randperm(patches, generator=generator, device=generator.device) for _ in images]
        elif len(generator) == len(images):
            drawn = [torch.randperm(patches, generator=g, device=g.device) for g in generator]
        else:
            raise InputError(
                f"generator: expected one, or one for each of {len(images)} images, got {len(generator)}"
            )
        return torch.stack(drawn).to(images.device)

    return _drop(adapt(model), images, labels, order, shares)


def salient_drop(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    scores: Float[Tensor, "b gh gw"],
    *,
    shares: Sequence[float] = SHARES,
) -> Curve:
    """The curve while patches are dropped, the highest of `scores` first (an `Attribution.scores`).

    Examples:
        >>> import steadygaze as sg
        >>> loaded, images = sg.load_model("embedded"), torch.randn(1, 3, 32, 32)
        >>> scores = sg.explain(loaded, images, target=3).scores
        >>> salient_drop(loaded.model, images, torch.tensor([3]), scores, shares=(0.0, 0.5)).right.shape
        torch.Size([1, 2])
    """

    def order(patches: int) -> Tensor:
        if scores.dim() != 3 or len(scores) != len(images) or scores[0].numel() != patches:
            raise InputError(
                f"scores: expected a map (B, rows, columns) of {patches} patches for each image, "
                f"got {tuple(scores.shape)}"
            )
        if not torch.isfinite(scores).all():
            raise InputError("scores: expected finite numbers, got NaN or infinity")
        return scores.flatten(1).argsort(dim=1, descending=True, stable=True).to(images.device)

    return _drop(adapt(model), images, labels, order, shares)


def _drop(
    vit: ViT, images: Tensor, labels: Any, order: Callable[[int], Tensor], shares: Sequence[float]
) -> Curve:
    shares = tuple(float(share) for share in shares)
    if not shares or any(b <= a for a, b in pairwise(shares)) or shares[0] < 0 or shares[-1] > 1:
        raise InputError(f"shares: expected numbers from 0 to 1 in rising order, got {shares}")
    labels = checked_labels(labels, len(images), images.device)
    with torch.no_grad(), evaluation_mode(vit.model):
        tokens = vit.embed(images)
        whole = vit.logits(tokens)
        classes = whole.shape[1]
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise InputError(
                f"labels: expected classes 0..{classes - 1}, got {int(labels.min())}..{int(labels.max())}"
            )
        grid = vit.layout(tokens).grid if vit.plan.removable else vit.grid
        patches = grid[0] * grid[1]
        dropped = order(patches)
        answers = [_answer(vit, tokens, whole, dropped, grid, int(share * patches)) for share in shares]
    nothing = whole.new_full(whole.shape, 1 / classes)
    probabilities = [nothing if a is None else at_least_float32(a).softmax(-1) for a in answers]
    probability = torch.stack(
        [p.gather(1, labels[:, None])[:, 0].to(probabilities[0].dtype) for p in probabilities], 1
    )
    right = [
        p[:, 0] if a is None else (a.argmax(1) == labels) for a, p in zip(answers, probabilities, strict=True)
    ]
    means = "removal" if vit.plan.removable else "attention masking"
    return Curve(shares, torch.stack([r.to(probability.dtype) for r in right], 1), probability, means)


def _answer(
    vit: ViT, tokens: Tensor, whole: Tensor, dropped: Int[Tensor, "b p"], grid: tuple[int, int], k: int
) -> Tensor | None:
    """Logits with the first k of `dropped` gone; None where nothing is left that the head could read."""
    if k == 0:
        return whole
    if k == dropped.shape[1] and (
        vit.readout != "class" or vit.plan.readout_patches > 0 or not vit.plan.removable
    ):
        return None
    if vit.plan.removable:
        return vit.logits(vit.select(tokens, dropped[:, k:].sort(1).values))
    there = torch.ones_like(dropped, dtype=torch.bool).scatter_(1, dropped[:, :k], False)
    return masked_logits(vit, tokens, there.view(-1, *grid))
