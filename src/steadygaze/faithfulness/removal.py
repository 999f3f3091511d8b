"""Token removal: what does the model predict from the top patches alone, and what without them?

SkipPLUS (docs/equations.md#token-removal).

Patches are removed after `embed`, each of the others stays at its position, prefix tokens always stay. With P patches,
ratio r and k = int(r·P), ranked by the map (stable, descending; ties in raster order):

    insertion keeps the top k         deletion removes the top k, so P − k are left
    accuracy(r) = 100 · [argmax = target]          AOPC(r) = 100 · (p_whole − p_left) of the target
    area = ∫ curve dr / (r_last − r_first), trapezoid; a single ratio: the curve itself

    insertion_accuracy = area                      deletion_accuracy = 100 − area
    insertion_aopc     = 100 − area                deletion_aopc     = area            higher is better in all four

All four come from one set of forward passes. Passes with the same number of patches left share a batch, over maps,
images, insertion and deletion, in chunks of a bounded number of tokens. `embed` and the pass on the whole image happen
once for all maps.

A model whose patches cannot be removed (Swin) is masked instead (`vit.masking`). A model that reads only patches
predicts nothing when none is left: probability and expected accuracy are then 1 / classes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.faithfulness.inputs import RATIOS, MetricInput, Whole, softmax
from steadygaze.faithfulness.metric import Curve, Metric, Values, add_metrics
from steadygaze.vit.packing import Group
from steadygaze.vit.subsets import Piece, pieces, reads_nothing, run_pieces

NAMES = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")


def ranking(maps: Float[Tensor, "*b gh gw"]) -> Int[Tensor, "*b p"]:
    """Patches by relevance, highest first; equal ones in raster order."""
    return maps.flatten(-2).argsort(dim=-1, descending=True, stable=True)


def removal(
    whole: Whole,
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    ratios: Sequence[float] = RATIOS,
) -> dict[str, Values]:
    """The four removal scores of every map, in percent, higher is better; `detail` is the raw curve over the ratios."""
    ratios = checked(ratios)
    correct, probability = curves(whole, ranking(maps), target, ratios)
    lost = whole.probabilities.gather(1, target[:, None])[:, 0][:, None] - probability  # (2, M, B, R)
    raw = dict(zip(NAMES, (*(100 * correct), *(100 * lost)), strict=True))
    lower_is_better = ("deletion_accuracy", "insertion_aopc")
    areas = {name: area(curve, ratios) for name, curve in raw.items()}
    scores = {name: 100 - areas[name] if name in lower_is_better else areas[name] for name in NAMES}
    note = "removal" if whole.vit.plan.removable else "attention masking"
    return {name: Values(scores[name], raw[name], note) for name in NAMES}


def curves(
    whole: Whole, order: Int[Tensor, "m b p"], target: Int[Tensor, " b"], ratios: Sequence[float]
) -> tuple[Float[Tensor, "2 m b r"], Float[Tensor, "2 m b r"]]:
    """(correct prediction 0 or 1, probability of the target), first for insertion, then for deletion, at every ratio."""
    m, b, p = order.shape
    image = torch.arange(b, device=order.device).repeat(m)
    correct = whole.probabilities.new_empty(2, len(ratios), m * b)
    probability = correct.clone()
    runs = [
        (kind, column, int(r * p) if kind == 0 else p - int(r * p))
        for kind in (0, 1)
        for column, r in enumerate(ratios)
    ]
    wanted: list[Piece] = []
    for kind, column, left in sorted(runs, key=lambda run: run[2]):
        here = (kind, column)
        if left == p:
            correct[here] = (whole.logits.argmax(1) == target).to(correct.dtype).repeat(m)
            probability[here] = whole.probabilities.gather(1, target[:, None])[:, 0].repeat(m)
        elif left == 0 and reads_nothing(whole.vit):
            correct[here] = probability[here] = 1 / whole.probabilities.shape[1]
        else:
            keep = order[..., :left] if kind == 0 else order[..., p - left :]
            wanted += pieces(whole.vit, whole.tokens, Group(image, keep.reshape(m * b, left)), here)
    for piece, logits in run_pieces(whole.vit, whole.tokens, wanted):
        classes = target[piece.group.image]
        correct[piece.place] = (logits.argmax(1) == classes).to(correct.dtype)
        probability[piece.place] = softmax(logits).gather(1, classes[:, None])[:, 0]
    shape = (2, len(ratios), m, b)
    return correct.view(shape).permute(0, 2, 3, 1), probability.view(shape).permute(0, 2, 3, 1)


def area(curve: Float[Tensor, "*b r"], ratios: Sequence[float]) -> Float[Tensor, "*b"]:
    """Trapezoid over the ratios, divided by their span: the mean height of the curve."""
    if len(ratios) == 1:
        return curve[..., 0].double()
    x = torch.tensor(ratios, dtype=torch.float64, device=curve.device)
    height = torch.trapezoid(curve.double(), x, dim=-1) / (x[-1] - x[0])
    # rounding must not leave the curve's range
    return height.clamp(curve.double().amin(-1), curve.double().amax(-1))


def checked(ratios: Sequence[float]) -> tuple[float, ...]:
    """Ratios in 0..1, rising."""
    numbers = tuple(float(r) for r in ratios)
    rising = all(a < b for a, b in pairwise(numbers))
    if not numbers or not rising or numbers[0] < 0 or numbers[-1] > 1:
        raise BadInput(
            f"ratios: expected numbers from 0 to 1 in rising order, such as 0.1, 0.5, 0.9, got {list(ratios)}"
        )
    return numbers


# -- registration ------------------------------------------------------------------------------------------------------


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """All four scores from one set of forward passes."""
    return removal(given.whole, given.maps, given.target, given.ratios)


def _entry(name: str, low: float, high: float, summary: str, curve: Curve) -> Metric:
    area_text = "area under the curve over the ratios, by token removal"
    return Metric(
        name,
        "%",
        "higher",
        low,
        high,
        summary=f"{summary}; {area_text}",
        family="removal",
        compute=compute,
        curve=curve,
    )


KEPT, REMOVED = "Only the top patches kept", "The top patches removed"
CORRECT, LOST = "correct predictions, %", "probability lost, points"
add_metrics(
    [
        _entry(
            "insertion_accuracy",
            0,
            100,
            "correct predictions from the top k patches alone",
            Curve(KEPT, CORRECT, "higher is better"),
        ),
        _entry(
            "deletion_accuracy",
            0,
            100,
            "100 − correct predictions without the top k patches",
            Curve(REMOVED, CORRECT, "lower is better"),
        ),
        _entry(
            "insertion_aopc",
            0,
            200,
            "100 − probability lost with the top k patches alone",
            Curve(KEPT, LOST, "lower is better"),
        ),
        _entry(
            "deletion_aopc",
            -100,
            100,
            "probability lost without the top k patches",
            Curve(REMOVED, LOST, "higher is better"),
        ),
    ]
)
