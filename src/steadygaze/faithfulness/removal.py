"""Token removal: what does the model say with the top patches alone, and what without them?

SkipPLUS (docs/equations.md#token-removal).

Patches are removed after `embed`, each of the others stays at its position, prefix tokens always stay. With P patches,
ratio r and k = int(r·P), ranked by the map (stable, descending; ties in raster order):

    insertion keeps the top k         deletion removes the top k, so P − k are left
    accuracy(r) = 100 · [argmax = target]          AOPC(r) = 100 · (p_whole − p_left) of the target
    area = ∫ curve dr / (r_last − r_first), trapezoid; a single ratio: the curve itself

    insertion_accuracy = area                      deletion_accuracy = 100 − area
    insertion_aopc     = 100 − area                deletion_aopc     = area            higher is better in all four

All four come from one set of runs. Runs with the same number of patches left share a batch, over maps, images, insertion
and deletion, in chunks of a bounded number of tokens. `embed` and the run on the whole image happen once for all maps.

A model whose patches cannot be removed (Swin) is masked instead (`vit.masking`). A model that reads only patches says
nothing when none is left: probability and expected accuracy 1 / classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.faithfulness.metric import Values
from steadygaze.vit import ViT
from steadygaze.vit.packing import Group
from steadygaze.vit.subsets import Piece, chunk_of, pieces, reads_nothing, run_pieces

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NAMES = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")


@dataclass(frozen=True)
class CachedForward:
    """A batch of images seen by the model once: everything that all maps and measures share."""

    vit: ViT
    images: Float[Tensor, "b c h w"]

    @cached_property
    def tokens(self) -> Float[Tensor, "b n d"]:
        """The embedding."""
        return self.vit.embed(self.images)

    @cached_property
    def logits(self) -> Float[Tensor, "b classes"]:
        """Logits of the whole images."""
        return self.vit.logits(self.tokens)

    @cached_property
    def probabilities(self) -> Float[Tensor, "b classes"]:
        """Softmax of the logits, at least in float32."""
        return softmax(self.logits)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of a map."""
        return self.vit.layout(self.tokens).grid

    @property
    def chunk(self) -> int:
        """Tokens that may run at once."""
        return chunk_of(self.images)


def softmax(logits: Tensor) -> Tensor:
    """Probabilities, at least in float32."""
    return at_least_float32(logits).softmax(-1)


def at_least_float32(x: Tensor) -> Tensor:
    """The same, at least in float32: what half precision gave is not rounded again."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def ranking(maps: Float[Tensor, "*b gh gw"]) -> Int[Tensor, "*b p"]:
    """Patches by relevance, highest first; equal ones in raster order."""
    return maps.flatten(-2).argsort(dim=-1, descending=True, stable=True)


def removal(whole: CachedForward, maps: Float[Tensor, "m b gh gw"], target: Int[Tensor, " b"],
            ratios: Sequence[float] = RATIOS) -> dict[str, Values]:  # fmt: skip
    """The four removal scores of every map, in percent, higher is better; `detail` is the raw curve over the ratios."""
    ratios = checked_ratios(ratios)
    right, probability = curves(whole, ranking(maps), target, ratios)
    lost = whole.probabilities.gather(1, target[:, None])[:, 0][:, None] - probability  # (2, M, B, R)
    raw = dict(zip(NAMES, (*(100 * right), *(100 * lost)), strict=True))
    turned = ("deletion_accuracy", "insertion_aopc")
    areas = {name: area(curve, ratios) for name, curve in raw.items()}
    return {name: Values(100 - areas[name] if name in turned else areas[name], raw[name]) for name in NAMES}


def curves(whole: CachedForward, order: Int[Tensor, "m b p"], target: Int[Tensor, " b"],
           ratios: Sequence[float]) -> tuple[Float[Tensor, "2 m b r"], Float[Tensor, "2 m b r"]]:  # fmt: skip
    """(right answer 0 or 1, probability of the target), first for insertion, then for deletion, at every ratio."""
    m, b, p = order.shape
    image = torch.arange(b, device=order.device).repeat(m)
    right = whole.probabilities.new_empty(2, len(ratios), m * b)
    probability = right.clone()
    runs = [
        (kind, column, int(r * p) if kind == 0 else p - int(r * p))
        for kind in (0, 1)
        for column, r in enumerate(ratios)
    ]
    wanted: list[Piece] = []
    for kind, column, left in sorted(runs, key=lambda run: run[2]):
        here = (kind, column)
        if left == p:
            right[here] = (whole.logits.argmax(1) == target).to(right.dtype).repeat(m)
            probability[here] = whole.probabilities.gather(1, target[:, None])[:, 0].repeat(m)
        elif left == 0 and reads_nothing(whole.vit):
            right[here] = probability[here] = 1 / whole.probabilities.shape[1]
        else:
            keep = order[..., :left] if kind == 0 else order[..., p - left :]
            wanted += pieces(whole.vit, whole.tokens, Group(image, keep.reshape(m * b, left)), here)
    for piece, logits in run_pieces(whole.vit, whole.tokens, wanted):
        classes = target[piece.group.image]
        right[piece.place] = (logits.argmax(1) == classes).to(right.dtype)
        probability[piece.place] = softmax(logits).gather(1, classes[:, None])[:, 0]
    shape = (2, len(ratios), m, b)
    return right.view(shape).permute(0, 2, 3, 1), probability.view(shape).permute(0, 2, 3, 1)


def area(curve: Float[Tensor, "*b r"], ratios: Sequence[float]) -> Float[Tensor, "*b"]:
    """Trapezoid over the ratios, divided by their span: the mean height of the curve."""
    if len(ratios) == 1:
        return curve[..., 0].double()
    x = torch.tensor(ratios, dtype=torch.float64, device=curve.device)
    height = torch.trapezoid(curve.double(), x, dim=-1) / (x[-1] - x[0])
    return height.clamp(
        curve.double().amin(-1), curve.double().amax(-1)
    )  # rounding must not leave the curve's range


def checked_ratios(ratios: Sequence[float]) -> tuple[float, ...]:
    """Ratios in 0..1, rising."""
    found = tuple(float(r) for r in ratios)
    rising = all(a < b for a, b in pairwise(found))
    if not found or not rising or found[0] < 0 or found[-1] > 1:
        raise BadInput(
            f"ratios: expected numbers from 0 to 1 in rising order, such as 0.1, 0.5, 0.9, got {list(ratios)}"
        )
    return found
